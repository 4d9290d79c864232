"""docs/getting-started.md: followed from the first step to the last, as a reader would."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from uuid import UUID

import pytest

from outbox_relay.workbench.embedded.ports import free_port
from tests.docs.pages import Block, blocks, prose
from tests.support.command import Ended, inside
from tests.support.database import Database
from tests.support.postgres import PostgresServer
from tests.support.service import RelayService
from tests.support.wait import until

PAGE = "docs/getting-started.md"
SECONDS = 60


class Reader:
    """Somebody who takes the blocks of the page one after the other, on a server and with ports of their own."""

    def __init__(self, shop: Database, place: Path) -> None:
        self.shop = shop
        self.place = place
        self.uid = ""
        self._left = list(blocks(PAGE))
        self._receiver = free_port()

    def take(self, language: str, *words: str) -> str:
        """The next block, which has to be in this language and hold these words."""
        block: Block = self._left.pop(0)
        assert block.language == language, block
        assert all(word in block.text for word in words), block
        here = block.text.replace("8000", str(self._receiver))
        return re.sub(r"postgresql://(\w+)@localhost/shop", lambda found: self.shop.dsn_as(found[1]), here)

    def sql(self, user: str, *words: str) -> None:
        """Run a block of statements."""
        with self.shop.connect(user=user) as conn:
            conn.execute(self.take("sql", *words).encode())

    def command(self, *words: str) -> list[Ended]:
        """Run the commands of a block; each of them ends well."""
        ended: list[Ended] = []
        for line in self.take("sh", *words).splitlines():
            program, *arguments = (self.uid if word == "UID" else word for word in _split(line))
            assert program == "outbox-relay"
            ended.append(inside(*(self._here(word) for word in arguments)))
            assert (ended[-1].code, ended[-1].err) == (0, ""), line
        return ended

    def _here(self, word: str) -> str:
        return str(self.place / word) if word == "relay.toml" else word

    @contextmanager
    def receiver(self) -> Generator[Path]:
        """The page's receiver; where it prints to."""
        program, printed = self.place / "receiver.py", self.place / "printed"
        program.write_text(self.take("python", "serve_forever"))
        with printed.open("wb") as output:
            process = subprocess.Popen([sys.executable, program], stdout=output, stderr=subprocess.STDOUT)
        try:
            yield printed
        finally:
            process.kill()
            process.wait(10)

    @contextmanager
    def relay(self, config: str) -> Generator[None]:
        """`outbox-relay run` with the page's file, which gets a free port to listen at."""
        [line] = self.take("sh", "outbox-relay run").splitlines()
        assert line == "outbox-relay run -c relay.toml"
        without = re.sub(r"\[http\]\nlisten = .*\n", "", config)
        assert without != config
        with RelayService(self.place, without):
            yield

    def emit(self) -> None:
        """What the page's application does."""
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", self.take("python", "outbox.emit")],
            capture_output=True, check=False, text=True, timeout=SECONDS,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        self.uid = str(UUID(done.stdout.strip()))

    @property
    def through(self) -> bool:
        """Is there no block left?"""
        return not self._left


def _split(line: str) -> list[str]:
    """The words of a command line; a connection string of this server's is one word."""
    words = shlex.split(line)
    if "--dsn" not in words:
        return words
    at = words.index("--dsn") + 1
    end = next((n for n in range(at, len(words)) if words[n].startswith("--")), len(words))
    return [*words[:at], " ".join(words[at:end]), *words[end:]]


@pytest.fixture
def reader(own_postgres: PostgresServer, tmp_path: Path) -> Reader:
    """A reader with a database `shop`, on a server where the page's roles do not exist."""
    own_postgres.create_database("shop")
    return Reader(Database(own_postgres, "shop"), tmp_path)


def test_the_page_is_true(reader: Reader) -> None:
    reader.take("sh", "pip install 'outbox-relay[demo]'", "outbox-relay demo")
    reader.take("sh", "pip install 'outbox-relay[relay]' standardwebhooks")
    reader.sql("postgres", "create role shop_app")
    [migrated] = reader.command("outbox-relay migrate")
    assert "granted emit to shop_app, relay to relay" in migrated.out
    with ExitStack() as stack:
        printed = stack.enter_context(reader.receiver())
        config = reader.take("toml", "[sinks.crm]")
        (reader.place / "relay.toml").write_text(config)
        reader.take("sh", "openssl")
        check = reader.take("sh", "outbox-relay check -c relay.toml --online").split()[1:]
        until(lambda: _check(reader, check) == 0, seconds=SECONDS, what="everything answers")
        stack.enter_context(reader.relay(config))
        reader.emit()
        reader.sql("shop_app", "update orders", "outbox.emit('order.changed'")
        wanted = ['order.created order-1 {"id":1,"total":"12.34"}', 'order.changed order-1 {"id": 1, "total": "15"}']
        until(lambda: printed.read_text().splitlines() == wanted, seconds=SECONDS, what="the receiver prints both")
        until(lambda: _delivered(reader), seconds=SECONDS, what="the positions of both are written")
        status, why = reader.command("outbox-relay status", "outbox-relay why UID")
        assert re.search(r"^crm +0 ", status.out, re.MULTILINE)
        assert re.search(r"^crm +delivered$", why.out, re.MULTILINE)
        assert printed.read_text().splitlines() == wanted
    assert {"events", "crm"} == tomllib.loads(reader.take("toml"))["sinks"].keys()
    assert reader.through


def _check(reader: Reader, arguments: list[str]) -> int:
    return inside(*(str(reader.place / word) if word == "relay.toml" else word for word in arguments)).code


def _delivered(reader: Reader) -> bool:
    found = inside("status", "--json", "--dsn", reader.shop.dsn).json
    return found["sinks"]["crm"]["backlog"] == 0


def test_the_page_says_how_the_receiver_is_started() -> None:
    assert "`python receiver.py`" in prose(PAGE)
