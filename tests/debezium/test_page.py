"""docs/debezium.md: every block is run as it stands, in its order, while producers go on inserting."""

import json
import re
import shlex
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest
from psycopg.types.json import Jsonb

from outbox_relay import outbox
from tests.debezium.records import SECONDS, compare, headers, read, uid
from tests.support.command import outbox_relay
from tests.support.connect import ConnectWorker
from tests.support.database import Database
from tests.support.kafka import KafkaBroker
from tests.support.postgres import PostgresServer
from tests.support.service import RelayService
from tests.support.wait import until

PAGE_SECONDS = 600
TEXT = (Path(__file__).parents[2] / "docs" / "debezium.md").read_text(encoding="utf-8")
pytestmark = [pytest.mark.debezium, pytest.mark.timeout(PAGE_SECONDS)]
BLOCKS = re.findall(r"<!-- run: ([a-z ]+) -->\n```(\w+)\n(.*?)```\n", TEXT, re.DOTALL)
TOPIC = "outbox.event.order"
WRITERS = 3


class Page:
    """The blocks of the page, taken one after the other, with the names of hosts as they are here."""

    def __init__(self, shop: Database, worker: ConnectWorker, kafka: KafkaBroker, directory: Path) -> None:
        self.shop = shop
        self.worker = worker
        self.kafka = kafka
        self.directory = directory
        self.left = list(BLOCKS)

    def take(self, kind: str) -> str:
        """Return the next block, which has to be of this kind."""
        found, _, text = self.left.pop(0)
        assert found == kind
        return text

    def sql(self) -> None:
        """Run statements as the schema's owner."""
        text = self.take("sql")
        with self.shop.connect(autocommit=True) as conn:
            for statement in re.split(r";\n", text):
                if statement.strip():
                    conn.execute(statement.encode())

    def sh(self) -> None:
        """Run an outbox-relay command."""
        words = shlex.split(self.take("sh"))
        done = outbox_relay(*(self.here(word) for word in words[1:]))
        assert (words[0], done.code) == ("outbox-relay", 0), done.err

    def curl(self) -> None:
        """Ask Kafka Connect, and wait for the state that was asked for."""
        for line in self.take("curl").splitlines():
            curl, option, method, url = line.split()
            assert (curl, option) == ("curl", "-X")
            path = url.removeprefix("http://localhost:8083")
            self.worker.ask(method, path)
            if path.endswith(("/stop", "/resume")):
                name = path.split("/")[2]
                self.worker.await_state(name, "STOPPED" if path.endswith("/stop") else "RUNNING")

    def python(self, kind: str) -> str:
        """Run a program; what it prints."""
        program = self.take(f"python {kind}").replace("localhost:9092", self.kafka.bootstrap)
        command = [sys.executable, "-W", "error", "-c", program]
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=SECONDS)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def relay(self, name: str) -> RelayService:
        """Return a relay with this configuration, not yet started."""
        config = self.take(f"relay {name}").replace("localhost:9092", self.kafka.bootstrap)
        return RelayService(
            self.directory, re.sub(r'"(postgresql:[^"]*)"', lambda m: f'"{self.here(m[1])}"', config), name
        )

    def connector(self, name: str, text: str) -> None:
        """Give Kafka Connect a connector's configuration and wait until it reads from its slot."""
        config: dict[str, str] = json.loads(text)
        config |= {"database.hostname": "127.0.0.1", "database.port": str(self.shop.server.port)}
        self.worker.connect(name, config)
        self.slot_is(config["slot.name"], active=True)

    def slot_is(self, name: str, *, active: bool) -> None:
        """Wait until a slot is read, or is not."""
        with self.shop.connect(autocommit=True) as conn:
            question = "select from pg_replication_slots where slot_name = %s and active = %s"
            until(
                lambda: conn.execute(question, [name, active]).fetchone() is not None,
                seconds=SECONDS,
                what=f"slot {name}: active is {active}",
            )

    def here(self, word: str) -> str:
        """Return a line of the page in which connection strings are those of this server."""
        user = re.fullmatch(r"postgresql://(\w+)@localhost/shop", word)
        return self.shop.dsn_as(user[1]) if user else word


class Producers:
    """Threads that insert for keys of their own; what of each key was committed, in its order."""

    def __init__(self, shop: Database, user: str) -> None:
        self._shop = shop
        self._user = user
        self._stop = threading.Event()
        self._failed: list[BaseException] = []
        self.committed: Mapping[bytes, list[bytes]] = {
            f"writer-{number}-{turn}".encode(): [] for number in range(WRITERS) for turn in range(2)
        }

    @contextmanager
    def running(self) -> Generator[None]:
        """Insert for the length of a `with` block."""
        threads = [threading.Thread(target=self._work, args=[number]) for number in range(WRITERS)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._stop.set()
            for thread in threads:
                thread.join()
        assert not self._failed

    def moved(self) -> None:
        """Wait until every key has had more rows."""
        before = {key: len(uids) for key, uids in self.committed.items()}
        until(
            lambda: self._failed or all(len(self.committed[key]) > before[key] + 3 for key in before),
            seconds=SECONDS,
            what="producers go on",
        )

    def _work(self, number: int) -> None:
        try:
            with self._shop.connect(user=self._user, autocommit=True) as conn:
                turn = 0
                while not self._stop.wait(0.01):
                    turn += 1
                    key, new = f"writer-{number}-{turn % 2}", uuid4()
                    statement = "insert into outboxevent values (%s, 'order', %s, 'OrderChanged', %s)"
                    with conn.transaction():
                        conn.execute(statement, [new, key, Jsonb({"turn": turn})])
                        conn.execute("delete from outboxevent where id = %s", [new])
                    self.committed[key.encode()].append(str(new).encode())
        except BaseException as error:
            self._failed.append(error)


@pytest.fixture
def page(logical: PostgresServer, worker: ConnectWorker, kafka: KafkaBroker, tmp_path: Path) -> Page:
    """Return the page on a database of the name that it uses, with the roles that it takes for granted."""
    logical.create_database("shop")
    with logical.connect() as conn:
        conn.execute("create role relay login")
        conn.execute("create role producer login")
    return Page(Database(logical, "shop"), worker, kafka, tmp_path)


def test_the_page_is_true(page: Page) -> None:
    assert TEXT.count("```") == 2 * len(BLOCKS)
    with ExitStack() as stack:
        page.sql()
        config = page.take("connector outbox")
        page.connector("outbox", config)
        with page.shop.connect() as conn:
            conn.execute("grant select, insert, delete on outboxevent to producer")
        compared(page, stack)
        producers = Producers(page.shop, "producer")
        with producers.running():
            switched(page, producers, stack)
            assert_all(page.kafka, producers)
            back_by_the_table(page, producers, config)
        assert_all(page.kafka, producers)
        back_by_the_log(page, stack)
        assert page.left == []
    for name in ("outbox", "outbox_log"):
        page.worker.remove(name)


def compared(page: Page, stack: ExitStack) -> None:
    """Adopt the table and compare the shadow."""
    page.sh()
    with page.shop.connect() as conn:
        insert(conn, UUID(int=0), None)
    page.sql()
    relay = stack.enter_context(page.relay("shadow"))
    with page.shop.connect(user="producer") as conn:
        for n, payload in enumerate([{"id": 1, "name": "zoë 漢字 😀"}, [1, 2], "text", None, {"big": "x" * 300_000}]):
            insert(conn, uuid4(), payload, f"order-{n % 2}")
    read(page.kafka, TOPIC, 6)
    read(page.kafka, f"shadow.{TOPIC}", 5)
    assert page.python("compare") == "5 records are the same, 1 are the connector's alone\n"
    assert relay.stop() == 0


def insert(conn: psycopg.Connection[Any], new: UUID, payload: object, key: str = "order-1") -> None:
    """Insert a row as a producer does."""
    statement = "insert into outboxevent values (%s, 'order', %s, 'OrderCreated', %s)"
    conn.execute(statement, [new, key, Jsonb(payload)])


def switched(page: Page, producers: Producers, stack: ExitStack) -> None:
    """Follow the page from the connector to the relay."""
    producers.moved()
    page.sql()
    stack.enter_context(page.relay("events"))
    page.sh()
    producers.moved()
    until(lambda: unowned(page) == 64, seconds=SECONDS, what="the relay has released the sink")
    page.sql()
    producers.moved()
    page.python("await")
    page.curl()
    page.sh()
    page.curl()
    page.slot_is("outbox", active=False)
    page.sql()
    producers.moved()


def back_by_the_table(page: Page, producers: Producers, config: str) -> None:
    """Follow the page from the relay back to a connector that reads the old table."""
    page.sql()
    producers.moved()
    until(lambda: backlog(page) == 0, seconds=SECONDS, what="the relay has delivered everything")
    page.connector("outbox", config)
    producers.moved()


def backlog(page: Page) -> int:
    """Return the number of events that the relay's sink has not delivered."""
    done = outbox_relay("status", "--json", "--dsn", page.shop.dsn)
    return done.json["sinks"]["events"]["backlog"]


def unowned(page: Page) -> int:
    """Return the number of shards of the relay's sink without an owner."""
    done = outbox_relay("status", "--json", "--dsn", page.shop.dsn)
    return done.json["sinks"]["events"]["unowned"]


def back_by_the_log(page: Page, stack: ExitStack) -> None:
    """Follow the page from the relay back to a connector that reads the log."""
    page.sql()
    page.connector("outbox_log", page.take("connector log"))
    config = page.directory / "events.toml"
    text = config.read_text().split("[http]")[0].replace("outbox.event.{headers.aggregatetype}", "relay.{type}")
    stack.enter_context(RelayService(page.directory, text.replace("events", "log"), "log"))
    with page.shop.connect() as conn:
        events = [
            outbox.Event("order.created", {"id": 1, "name": "zoë 漢字"}, key="order-1"),
            outbox.Event("order.created", b"\x00\xff", key="order-2", content_type="image/x"),
            outbox.Event("order.created", [], key=None),
            outbox.Event("order.created", [], key="order-1", headers={"traceparent": "00-1", "x": "ü"}),
        ]
        uids = outbox.emit_many(conn, events)
    ours, theirs = read(page.kafka, "relay.order.created", 4), read(page.kafka, "shop.order.created", 4)
    own = str(uids[-1]).encode()
    compare([record for record in ours if uid(record) != own], [record for record in theirs if uid(record) != own])
    (mine,), (its,) = ([record for record in found if uid(record) == own] for found in (ours, theirs))
    placed: Mapping[str, bytes] = headers(its)
    assert json.loads(placed["headers"]) == {"traceparent": "00-1", "x": "ü"}
    assert (mine.key, mine.value, mine.partition) == (its.key, its.value, its.partition)


def assert_all(kafka: KafkaBroker, producers: Producers) -> None:
    """Assert that every committed event has arrived, for the first time in the order of its key."""
    wanted = {key: list(uids) for key, uids in producers.committed.items()}

    def found() -> Mapping[bytes, Sequence[bytes]]:
        firsts: defaultdict[bytes | None, dict[bytes, None]] = defaultdict(dict)
        for record in kafka.read_all(TOPIC):
            firsts[record.key].setdefault(uid(record))
        return {key: list(firsts[key])[: len(uids)] for key, uids in wanted.items()}

    def is_whole() -> bool:
        return all(len(uids) == len(wanted[key]) for key, uids in found().items())

    until(is_whole, seconds=SECONDS, what="everything committed is in the topic")
    arrived = found()
    wrong = {key: first_difference(arrived[key], uids) for key, uids in wanted.items() if arrived[key] != uids}
    assert not wrong, f"key: (place, arrived there, committed there): {wrong}"


def first_difference(
    arrived: Sequence[bytes], committed: Sequence[bytes]
) -> tuple[int, Sequence[bytes], Sequence[bytes]]:
    """Return the place at which two orders differ, with the next few of each."""
    place = next(n for n, (one, other) in enumerate(zip(arrived, committed, strict=True)) if one != other)
    return place, arrived[place : place + 3], committed[place : place + 3]
