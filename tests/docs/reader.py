"""A reader who follows a page from its first block to its last."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from uuid import UUID

from tests.docs.pages import Block, blocks
from tests.support.command import Ended, inside
from tests.support.database import Database
from tests.support.service import RelayService

SECONDS = 60


class Reader:
    """Take the blocks of a page one after another, with the servers and ports of this test.

    `shop` is the page's database, and `place` the working directory. `instead` maps texts of the page, such as a port,
    to those of this test.
    """

    def __init__(self, page: str, shop: Database, place: Path, instead: Mapping[str, str]) -> None:
        self.shop = shop
        self.place = place
        self.uid = ""
        self._left = list(blocks(page))
        self._instead = instead

    def take(self, language: str, *words: str) -> str:
        """Return the next block, which must be in this language and hold these words."""
        block: Block = self._left.pop(0)
        assert block.language == language, block
        assert all(word in block.text for word in words), block
        here = block.text
        for text, replacement in self._instead.items():
            here = here.replace(text, replacement)
        return re.sub(r"postgresql://(\w+)@localhost/shop", lambda found: self.shop.dsn_as(found[1]), here)

    def sql(self, user: str, *words: str) -> None:
        """Run a block of statements."""
        with self.shop.connect(user=user) as conn:
            conn.execute(self.take("sql", *words).encode())

    def command(self, *words: str) -> list[Ended]:
        """Run the commands of a block, each of which must succeed without a message."""
        ended: list[Ended] = []
        for line in self.take("sh", *words).splitlines():
            ended.append(self.run(line))
            assert (ended[-1].code, ended[-1].err) == (0, ""), line
        return ended

    def run(self, line: str) -> Ended:
        """Run one command line of the page."""
        program, *arguments = (self.uid if word == "UID" else word for word in _split(line))
        assert program == "outbox-relay"
        return inside(*(str(self.place / word) if word == "relay.toml" else word for word in arguments))

    @contextmanager
    def receiver(self) -> Generator[Path]:
        """Start the page's receiver and return the file that it prints to."""
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
        """Run the relay with the page's file, on a free HTTP port."""
        without = re.sub(r"\[http\]\nlisten = .*\n", "", config)
        assert without != config
        with RelayService(self.place, without):
            yield

    def emit(self) -> None:
        """Run the page's application."""
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", self.take("python", "outbox.emit")],
            capture_output=True, check=False, text=True, timeout=SECONDS,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        self.uid = str(UUID(done.stdout.strip()))

    @property
    def through(self) -> bool:
        """Return True if no block is left."""
        return not self._left


def _split(line: str) -> list[str]:
    """Return the words of a command line. The connection string of a test server is one word."""
    words = shlex.split(line)
    if "--dsn" not in words:
        return words
    at = words.index("--dsn") + 1
    end = next((n for n in range(at, len(words)) if words[n].startswith("--")), len(words))
    return [*words[:at], " ".join(words[at:end]), *words[end:]]
