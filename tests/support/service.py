"""Relay processes as a container would run them: started, killed, stopped, asked how they are."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from outbox_relay.workbench.embedded.ports import free_port
from tests.support.fork_server import Child, of_this_process
from tests.support.wait import until

RELAY = ("outbox_relay",)
START_VARIABLES = ("PYTHON", "LD_", "OTEL_")
"""Variables with these beginnings count when a process starts or imports its modules, so for no forked one."""
READY_SECONDS = 30
STOP_SECONDS = 40
SHOWN_LINES = 20
"""Number of warnings and errors of the log that a failure shows at most, the last ones."""
_RESTARTED = re.compile(r"(sink|part)\.restarted|.+ starts again")
"""The events of a restarted session or another part, today and before events had names."""
_STOPS = frozenset({signal.SIGTERM, signal.SIGINT})


class RelayService:
    """One `outbox-relay run` process with a config file of its own in `directory`.

    It is forked from a process that has imported the modules, unless `program` or the environment asks for another
    Python. `config` is the TOML text without `[http]`, which is added on a free port. `program` is the module to run,
    with arguments before the command. `expects` are the reasons (:attr:`RelayError.reason`) for which the test makes
    sessions of sinks and other parts restart. Any other is an error when the process is stopped or killed, and at the
    end of the block. So is a process that ended by itself, unless the test asked for its code by :meth:`ended`.
    """

    def __init__(
        self,
        directory: Path,
        config: str,
        name: str = "relay",
        *,
        program: Sequence[str] = RELAY,
        expects: Collection[str] = (),
        **environment: str,
    ) -> None:
        self.expects = expects
        self._program = program
        self.port = free_port()
        self.config = directory / f"{name}.toml"
        self.config.write_text(f'{config}\n[http]\nlisten = "127.0.0.1:{self.port}"\n')
        self.log = directory / f"{name}.log"
        self._environment = environment
        self._process: subprocess.Popen[bytes] | Child | None = None
        self._counted: Counter[str] = Counter()
        self._end_is_known = False
        self._sent: set[signal.Signals] = set()

    def start(self, *, wait: bool = True) -> Self:
        """Start the process and, unless told otherwise, wait until it is ready."""
        self._judge_end()
        self._end_is_known = False
        self._sent.clear()
        self._process = self._forked() if self._program == RELAY and not self._needs_python else self._new_python()
        if wait:
            until(lambda: self.ready or self._ended_early(), seconds=READY_SECONDS, what=f"{self.config.stem} is ready")
        return self

    @property
    def _needs_python(self) -> bool:
        """Return True if the environment is read by the linker, the interpreter or what it imports first."""
        return any(name.startswith(START_VARIABLES) for name in self._environment)

    @property
    def _variables(self) -> dict[str, str]:
        return {**os.environ, "OUTBOX_RELAY_LOG_FORMAT": "json", **self._environment}

    def _forked(self) -> Child:
        return of_this_process().start(["run", "-c", self.config], self.log, self._variables)

    def _new_python(self) -> subprocess.Popen[bytes]:
        with self.log.open("ab") as output:
            return subprocess.Popen(
                [sys.executable, "-X", "faulthandler", "-m", *self._program, "run", "-c", self.config],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self._variables,
                start_new_session=True,
            )

    @property
    def ready(self) -> bool:
        """Does /readyz say that the relay does its work?"""
        return self.ask("/readyz")[0] == 200

    def ask(self, path: str) -> tuple[int, Any]:
        """Return status and JSON body of a GET, or (0, None) if nothing listens."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())
        except (OSError, http.client.HTTPException):
            return 0, None
        finally:
            connection.close()

    @property
    def process(self) -> subprocess.Popen[bytes] | Child:
        """The running process."""
        assert self._process is not None, "not started"
        return self._process

    def send(self, number: signal.Signals) -> None:
        """Send a signal."""
        self._sent.add(number)
        self.process.send_signal(number)

    def ended(self, seconds: float) -> int:
        """Wait until the process has ended by itself, and return its exit code, which the test judges."""
        code = self.process.wait(seconds)
        self._end_is_known = True
        return code

    def kill(self) -> None:
        """Send SIGKILL, wait until the process is gone, and judge its restarts by the log alone."""
        self._judge_end()
        self._end()
        self.judge()

    def stop(self) -> int:
        """Send SIGTERM and return the exit code. A process that does not end shows its stacks."""
        self._judge_end()
        self._count_restarts()
        self.process.terminate()
        try:
            code = self.ended(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGABRT)
            self.process.wait(10)
            raise AssertionError(f"did not stop: {self.log.read_text()[-6000:]}") from None
        self.judge()
        return code

    def _end(self) -> None:
        self._end_is_known = True
        self.process.kill()
        self.process.wait(10)

    def _judge_end(self) -> None:
        """Raise AssertionError when the process ended by itself and the test does not know."""
        code = None if self._process is None else self._process.poll()
        asked = code == 0 and not self._sent.isdisjoint(_STOPS)
        assert code is None or asked or self._end_is_known, (
            f"{self.config.stem} ended by itself with {code}: {self.log.read_text()[-3000:]}"
        )

    def judge(self) -> None:
        """Raise AssertionError when a session or part restarted for a reason that the test did not declare."""
        logged = [line for line in self.lines() if _RESTARTED.fullmatch(str(line.get("event")))]
        found = self._counted | Counter(_cause(line) for line in logged)
        undeclared = {reason: count for reason, count in found.items() if reason not in self.expects}
        assert not undeclared, (
            f"{self.config.stem}: sessions restarted that this test did not cause: {undeclared}\n"
            + "\n".join(json.dumps(line) for line in self._warnings()[-SHOWN_LINES:])
        )

    def _warnings(self) -> list[dict[str, Any]]:
        """Return what the log says of restarts and of what leads to them, such as a destination that is down."""
        return [line for line in self.lines() if line.get("level") in ("warning", "error") or "left_out" in line]

    def _count_restarts(self) -> None:
        """Take over the counts of /readyz. The log leaves out lines that repeat within seconds."""
        _, body = self.ask("/readyz")
        sinks: dict[str, Any] = body["sinks"] if body else {}
        for sink in sinks.values():
            restarts: dict[str, int] = sink.get("restarts", {})  # versions before they were counted have none
            self._counted |= Counter(restarts)

    def lines(self) -> list[dict[str, Any]]:
        """Return its log lines so far."""
        found: list[dict[str, Any]] = []
        for line in self.log.read_text().splitlines():
            with contextlib.suppress(json.JSONDecodeError):
                found.append(json.loads(line))
        return found

    def _ended_early(self) -> bool:
        if self.process.poll() is not None:
            raise AssertionError(f"ended with {self.process.returncode}: {self.log.read_text()[-3000:]}")
        return False

    def __enter__(self) -> Self:
        return self if self._process else self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGCONT)
            if kind is None:
                self._count_restarts()
            self._end()
        if kind is None:
            self._judge_end()
            self.judge()


def _cause(line: dict[str, Any]) -> str:
    """Return the reason of a restart as /readyz counts it; versions before it was logged name none."""
    return str(line.get("cause") or "unknown")
