"""A child process with a group of its own, from its start until it and its group are gone."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Self


class ChildProcess:
    """Kills the group before its leader is waited for: until then no other process can have its id.

    ``on_exit`` is called in the event loop when the process has ended, by itself or not.
    """

    def __init__(self, process: subprocess.Popen[bytes], on_exit: Callable[[], None]) -> None:
        self._process = process
        self._on_exit = on_exit
        self._loop = asyncio.get_running_loop()
        self._exited = asyncio.Event()
        self._reaped = threading.Event()
        self._is_reaped = self._is_left = False

    @classmethod
    def start(
        cls, command: Sequence[str], environment: Mapping[str, str], pipe: int, output: int, on_exit: Callable[[], None]
    ) -> Self:
        """Start a process that inherits ``pipe``, and writes to ``output``. Raises ``OSError`` or ``RuntimeError``."""
        process = subprocess.Popen(  # noqa: S603 - the command is our own
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=(pipe,),
            env=dict(environment),
            start_new_session=True,
        )
        child = cls(process, on_exit)
        try:
            # A thread, since a handler of SIGCHLD would belong to the whole process, and old kernels have no pidfd.
            threading.Thread(target=child._wait, name=f"worker {process.pid}", daemon=True).start()
        except BaseException:
            child.kill()
            process.wait()
            raise
        return child

    @property
    def pid(self) -> int:
        """The id of the process and of its group."""
        return self._process.pid

    @property
    def exit_text(self) -> str:
        """Describe how the process ended."""
        code = self._process.returncode
        if code is None:
            return "it was killed and is not gone yet"
        return f"it was killed by signal {-code}" if code < 0 else f"it ended with exit status {code}"

    def kill(self) -> None:
        """Kill the group. Without effect once its leader was waited for."""
        if not self._is_reaped:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)

    async def reap(self, seconds: float) -> bool:
        """Kill the group, and wait for its leader. Return False if that has not ended within ``seconds``."""
        self.kill()
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._exited.wait()
        self._is_left = not self._exited.is_set()
        if not self._is_left:
            self._reap()
        return self._is_reaped

    def _reap(self) -> None:
        if not self._is_reaped:
            self.kill()  # what the leader started at the last moment
            self._is_reaped = True
            self._process.wait()
            self._reaped.set()

    def _wait(self) -> None:
        """Wait until the process has ended, and then for the killed rest of its group, which process 1 inherits."""
        with suppress(ChildProcessError):
            os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._exit)
        self._reaped.wait()
        with suppress(ChildProcessError):
            while True:
                os.waitpid(-self.pid, 0)

    def _exit(self) -> None:
        self._exited.set()
        self._on_exit()
        if self._is_left:
            self._reap()
