"""The relays of a run. Each is lent to one nemesis at a time and restarted immediately after it was killed."""

from __future__ import annotations

import http.client
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self, cast

from tests.chaos.relay_that_dies import Point
from tests.support.fork_server import Child, ForkServer
from tests.support.ports import free_port
from tests.support.wait import until

READY_SECONDS = 60
STOP_SECONDS = 45
LOOK_SECONDS = 0.1
ENVIRONMENT = {"OUTBOX_RELAY_LOG_FORMAT": "json"}


class Relay:
    """A member of the fleet: a configuration, a log, and one process at a time."""

    def __init__(self, directory: Path, name: str, config: str, fork_server: ForkServer) -> None:
        self.name = name
        self.port = free_port()
        self.config = directory / f"{name}.toml"
        self.config.write_text(f'{config}\n[http]\nlisten = "127.0.0.1:{self.port}"\n')
        self.log = directory / f"{name}.log"
        self.log.touch()
        self.lent = False
        self._fork_server = fork_server
        self._child: Child | None = None
        self._mark = 0

    @property
    def child(self) -> Child:
        """Return the current or the last process."""
        assert self._child is not None, f"{self.name} was never started"
        return self._child

    @property
    def runs(self) -> bool:
        """Return True while a process is running."""
        return self._child is not None and self._child.code is None

    def start(self, armed: Point | None = None) -> None:
        """Start a process that kills itself at the point `armed`, if given."""
        self._mark = self.log.stat().st_size
        self._child = self._fork_server.start(
            ["run", "-c", self.config], self.log, {**os.environ, **ENVIRONMENT}, armed
        )

    def start_under(self, environment: Mapping[str, str]) -> None:
        """Start a new Python process whose environment has these variables from the start."""
        self._mark = self.log.stat().st_size
        command = [sys.executable, "-X", "faulthandler", "-m", "outbox_relay", "run", "-c", self.config]
        with self.log.open("ab") as output:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
                env={**os.environ, **ENVIRONMENT, **environment},
            )  # fmt: skip
        self._child = child = Child(process.pid)
        threading.Thread(target=lambda: child.ended(process.wait()), daemon=True).start()

    def kill(self) -> float:
        """Send SIGKILL and wait until the process has ended. Return the time of the signal."""
        at = time.monotonic()
        self.child.send_signal(signal.SIGKILL)
        assert self.child.wait_for(10) is not None, f"{self.name} outlived SIGKILL"
        return at

    def stop(self) -> None:
        """Send SIGTERM and wait. Raise AssertionError if the process does not end in time, or not with 0.

        A process without any log line has not installed its signal handler, so SIGTERM may end it.
        """
        self.child.send_signal(signal.SIGTERM)
        code = self.child.wait_for(STOP_SECONDS)
        if code == -signal.SIGTERM and not self.said(self._mark):
            return
        if code is None:
            self.child.send_signal(signal.SIGABRT)
            self.child.wait_for(10)
        assert code == 0, f"{self.name} ended with {code} after SIGTERM: {self.log.read_text()[-1500:]}"

    def shards(self) -> int:
        """Return the number of its shards of all sinks; 0 if it does not answer."""
        status = self.ask("/readyz")[1]
        return sum(sink["shards"] for sink in status["sinks"].values()) if status else 0

    def ask(self, path: str) -> tuple[int, Any]:
        """Return status and JSON body of a GET; (0, None) without an answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=2)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())
        except (OSError, http.client.HTTPException, ValueError):
            return 0, None
        finally:
            connection.close()

    def said(self, since: int) -> list[dict[str, Any]]:
        """Return the log lines after the first `since` bytes."""
        with self.log.open("rb") as log:
            log.seek(since)
            lines = log.read().splitlines()
        return [said for line in lines if (said := _parsed(line))]


def _parsed(line: bytes) -> dict[str, Any] | None:
    """Parse a line of the log. Return None for a line of another kind, or one that a kill truncated."""
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return cast("dict[str, Any]", found) if isinstance(found, dict) else None


class Fleet:
    """`size` relays that run all the time, a guest that joins and leaves, and a stranger.

    The stranger has a configuration of its own.
    """

    def __init__(self, directory: Path, config: str, of_strange: str, fork_server: ForkServer, size: int) -> None:
        self.relays = [Relay(directory, f"relay-{n}", config, fork_server) for n in range(1, size + 1)]
        self.guest = Relay(directory, "guest", config, fork_server)
        self.strange = Relay(directory, "strange", of_strange, fork_server)
        self.unasked: list[str] = []
        """A text for each relay that ended by itself, with the end of its log."""
        self._freed = threading.Condition()
        self._closed = False
        self._over = threading.Event()
        self._watcher = threading.Thread(target=self._watch, daemon=True)

    @property
    def all(self) -> list[Relay]:
        """Return all members."""
        return [*self.relays, self.guest, self.strange]

    def start(self) -> None:
        """Start the relays and wait until they are ready."""
        for relay in self.relays:
            relay.start()
        for relay in self.relays:
            until(lambda relay=relay: relay.ask("/readyz")[0] == 200, seconds=READY_SECONDS, what=f"{relay.name} ready")
        self._watcher.start()

    @contextmanager
    def borrowed(self, rng: random.Random) -> Generator[Relay]:
        """Lend a random relay that no other nemesis has. It is started again at the end if it is not running."""
        with self._lent(self.relays, rng) as relay:
            yield relay

    @contextmanager
    def invited(self) -> Generator[Relay]:
        """Lend the guest, which runs neither before nor afterwards."""
        with self._lent([self.guest]) as relay:
            yield relay

    @contextmanager
    def estranged(self) -> Generator[Relay]:
        """Lend the stranger, which runs neither before nor afterwards."""
        with self._lent([self.strange]) as relay:
            yield relay

    @contextmanager
    def everybody(self) -> Generator[None]:
        """Lend all members together. Those that run all the time are started again at the end if necessary."""
        with self._freed:
            self._freed.wait_for(lambda: not self._closed)
            self._closed = True
            self._freed.wait_for(lambda: not any(relay.lent for relay in self.all))
            for relay in self.all:
                relay.lent = True
        try:
            yield
        finally:
            self._closed = False
            for relay in self.all:
                self._take_back(relay)

    @contextmanager
    def _lent(self, places: Sequence[Relay], rng: random.Random | None = None) -> Generator[Relay]:
        with self._freed:
            self._freed.wait_for(lambda: not self._closed and any(not relay.lent for relay in places))
            free = [relay for relay in places if not relay.lent]
            relay = rng.choice(free) if rng else free[0]
            relay.lent = True
        try:
            yield relay
        finally:
            self._take_back(relay)

    def _take_back(self, relay: Relay) -> None:
        if not relay.runs and relay in self.relays and not self._over.is_set():
            relay.start()
        with self._freed:
            relay.lent = False
            self._freed.notify_all()

    def stop_all(self) -> None:
        """Stop all running relays at the same time, as :meth:`Relay.stop` does."""
        running = [relay for relay in self.all if relay.runs]
        with ThreadPoolExecutor(len(self.all)) as pool:
            list(pool.map(Relay.stop, running))

    def stop(self) -> None:
        """Stop restarting relays, then stop all of them."""
        self.end_watch()
        self.stop_all()

    def end_watch(self) -> None:
        """Stop restarting relays."""
        self._over.set()
        if self._watcher.is_alive():
            self._watcher.join(5)

    def _watch(self) -> None:
        """Record and restart relays that end by themselves."""
        while not self._over.wait(LOOK_SECONDS):
            with self._freed:
                ended = [relay for relay in self.relays if not relay.lent and not relay.runs]
                for relay in ended:
                    self.unasked.append(f"{relay.name} ended with {relay.child.code}: {relay.log.read_text()[-2000:]}")
                    relay.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end_watch()
        for relay in self.all:
            if relay.runs:
                relay.child.send_signal(signal.SIGCONT)
                relay.kill()
