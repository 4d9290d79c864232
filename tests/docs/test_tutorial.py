"""docs/tutorial.md: followed from the first step to the last, as a reader would, with servers on other ports."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import psycopg
import pytest

from outbox_relay.workbench.embedded.ports import free_port
from tests.docs.pages import blocks, commands
from tests.support.child_processes import END_SECONDS, START_SECONDS, reachable
from tests.support.wait import until

PAGE = "docs/tutorial.md"
PORTS = ("15432", "8000", "8080", "8090")
SECONDS = 90
DATA = "outbox-relay dev --directory {}/data --postgres-port {} --kafka-port 0"


class Tutorial:
    """Take the blocks of the page one after another, in a directory of the test."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.uid = ""
        self.ports = {port: str(free_port()) for port in PORTS}
        self._left = list(blocks(PAGE))
        self._environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}

    def address(self, port: str) -> str:
        """Return the address of a server that has this port on the page."""
        return f"http://127.0.0.1:{self.ports[port]}"

    def lines(self, *words: str) -> list[str]:
        """Return the commands of the next block, which must have these words."""
        block = self._left.pop(0)
        assert block.language == "sh", block
        assert all(word in block.text for word in words), block
        return [self._here(line) for line in commands(block)]

    def save(self, language: str, name: str) -> None:
        """Write the next block to a file."""
        (self.place / name).write_text(self.code(language))

    def code(self, language: str) -> str:
        """Return the next block."""
        block = self._left.pop(0)
        assert block.language == language, block
        return self._here(block.text)

    def do(self, *words: str) -> list[str]:
        """Run the next commands, each of which must succeed, and return what each prints."""
        return [self.run(line) for line in self.lines(*words)]

    def export(self, line: str) -> None:
        """Set a variable for the commands that follow."""
        program, _, assignment = line.partition(" ")
        assert program == "export"
        name, _, value = assignment.partition("=")
        self._environment[name] = value

    def run(self, line: str) -> str:
        """Run a command line and return what it prints."""
        done = subprocess.run(
            ["/bin/sh", "-ec", line],
            cwd=self.place,
            env=self._environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=SECONDS,
        )
        assert done.returncode == 0, (line, done.stdout, done.stderr)
        return done.stdout

    @contextmanager
    def terminal(self, line: str, name: str) -> Generator[Path]:
        """Run a command line in the background, and yield the file with its output. At the end it is interrupted."""
        log = self.place / f"{name}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                ["/bin/sh", "-c", f"exec {line}"],
                cwd=self.place,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        try:
            yield log
            assert process.poll() is None, log.read_text()
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(END_SECONDS)
            finally:
                process.kill()
                process.wait(END_SECONDS)
        printed = log.read_text()
        assert printed.count("Traceback (") == printed.count("KeyError: 'AT'"), printed

    @property
    def through(self) -> bool:
        """Return True if no block is left."""
        return not self._left

    def _here(self, text: str) -> str:
        for port, mine in self.ports.items():
            text = text.replace(port, mine)
        return text.replace("UID", self.uid)


@pytest.fixture
def tutorial() -> Generator[Tutorial]:
    """Yield the page in an empty directory."""
    with reachable() as place:
        yield Tutorial(place)


def says(log: Path, words: str) -> None:
    """Wait until a program has printed something."""
    until(lambda: words in log.read_text(), seconds=START_SECONDS, what=f"{log.stem} says {words!r}")


def answers(address: str, status: int = 200) -> bool:
    """Return True if a server answers."""
    try:
        return httpx.get(address, timeout=20).status_code == status
    except httpx.TransportError:
        return False


def uid_in(answer: str) -> str:
    """Return the uid of the event in the answer to an order."""
    return str(httpx.Response(201, text=answer).json()["event"])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_page_is_true(tutorial: Tutorial) -> None:
    """Takes 40 s: it starts PostgreSQL, a broker, the application, a relay and the page."""
    page = tutorial
    dsn = f"postgresql://postgres@127.0.0.1:{page.ports['15432']}/dev"

    def invoices() -> list[tuple[int, int]]:
        with psycopg.connect(dsn) as conn:
            return conn.execute("select order_id, tax from invoices order by 1").fetchall()

    def has_invoices(*wanted: tuple[int, int]) -> None:
        until(lambda: invoices() == [*wanted], seconds=SECONDS, what=f"the invoices are {wanted}")

    page.lines("pip install")
    assert page.lines() == ["outbox-relay dev"]
    with ExitStack() as stack:
        servers = stack.enter_context(page.terminal(DATA.format(page.place, page.ports["15432"]), "dev"))
        says(servers, "Ctrl-C stops everything")
        page.save("python", "shop.py")
        *exports, uvicorn = page.lines("uvicorn")
        for line in exports:
            page.export(line)
        application = stack.enter_context(_application(page, uvicorn))
        page.save("toml", "relay.toml")
        check, run = page.lines("check", "run")
        page.run(check)
        stack.enter_context(page.terminal(run, "relay"))
        until(lambda: answers(f"{page.address('8080')}/readyz"), seconds=SECONDS, what="the relay is ready")
        [answer] = page.do("DE")
        page.uid = uid_in(answer)
        has_invoices((1, 190))
        until(
            lambda: "delivered" in page.run(f"outbox-relay why {page.uid} -c relay.toml"),
            seconds=SECONDS,
            what="the delivery is recorded",
        )
        status, why = page.do("status", "why")
        assert "billing" in status
        assert "204" in why

        [answer] = page.do("AT")
        page.uid = uid_in(answer)
        waiting = "outbox-relay dead list --json -c relay.toml"
        until(lambda: page.uid in page.run(waiting), seconds=SECONDS, what="the event is a dead letter")
        for printed in page.do("dead list", "why", "attempts"):
            assert "500" in printed
        program = (page.place / "shop.py").read_text()
        [before] = [line for line in program.splitlines(keepends=True) if line.startswith("TAXES")]
        (page.place / "shop.py").write_text(program.replace(before, page.code("python")))
        started = "Application startup complete"
        until(lambda: application.read_text().count(started) > 1, seconds=SECONDS, what="the program is loaded again")
        counted, _, audit = page.do("dead retry", "audit")
        assert "1" in counted
        assert "tax of Austria added" in audit
        has_invoices((1, 190), (2, 100))

        metrics, _ = page.do("/metrics", "/readyz")
        assert "outbox_oldest_undelivered_seconds" in metrics
        page.do("doctor")
        [ui] = page.lines("ui")
        with page.terminal(ui.replace("ui ", f"ui --listen 127.0.0.1:{page.ports['8090']} "), "ui"):
            found = f"{page.address('8090')}/events/{page.uid}"
            until(lambda: answers(found), seconds=SECONDS, what="the page has the event")
            assert all(status in httpx.get(found).text for status in ("answered 500", "204"))
            assert "tax of Austria added" in httpx.get(f"{page.address('8090')}/audit").text

        page.do("truncate invoices")
        assert invoices() == []
        dry, _, _ = page.do("replay start", "--dry-run", "replay list")
        assert "2" in dry
        has_invoices((1, 190), (2, 100))

        page.save("python", "test_shop.py")
        _, test = page.lines("pytest")
        assert "1 passed" in page.run(test.replace("pytest", "pytest -p no:cacheprovider"))
    page.lines("--grant-emit")
    assert page.through


@contextmanager
def _application(page: Tutorial, line: str) -> Generator[Path]:
    with page.terminal(line, "shop") as log:
        until(lambda: answers(f"{page.address('8000')}/docs"), seconds=SECONDS, what="the application answers")
        yield log
