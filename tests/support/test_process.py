"""A server that is started here ends with the process that started it, however that ends."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from outbox_relay.workbench.embedded.account import CURRENT
from outbox_relay.workbench.embedded.process import WatchedProcess
from tests.support.wait import until

LEAVE_A_SERVER = """
import os
from pathlib import Path
from outbox_relay.workbench.embedded.account import CURRENT
from outbox_relay.workbench.embedded.process import WatchedProcess

directory = Path({directory!r})
server = WatchedProcess(["sleep", "300"], directory=directory, log=directory / "log", account=CURRENT)
print(server.pid, flush=True)
os.kill(os.getpid(), 9)
"""


def is_running(pid: int) -> bool:
    """Return True if the process runs; one that has ended but was not yet waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_server_ends_with_a_run_that_was_killed(tmp_path: Path) -> None:
    directory = tmp_path / "server"
    directory.mkdir()
    code = LEAVE_A_SERVER.format(directory=str(directory))
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=20)
    assert done.returncode == -signal.SIGKILL, done.stderr
    pid = int(done.stdout)
    until(lambda: not is_running(pid), seconds=10, what="the abandoned server ended")
    until(lambda: not directory.exists(), seconds=10, what="its directory is gone")


@pytest.mark.parametrize("stopped", [False, True])
def test_server_that_ignores_a_signal_is_killed(tmp_path: Path, *, stopped: bool) -> None:
    command = ["/bin/sh", "-c", "trap '' TERM; while :; do sleep 0.1; done"]
    server = WatchedProcess(command, directory=tmp_path, log=tmp_path / "log", account=CURRENT)
    if stopped:
        server.send(signal.SIGSTOP)
    server.end(signal.SIGTERM, seconds=0.2)
    assert not server.alive
    assert tmp_path.exists()


def test_log_tells_what_the_server_said(tmp_path: Path) -> None:
    server = WatchedProcess(["echo", "here"], directory=tmp_path, log=tmp_path / "log", account=CURRENT)
    until(lambda: not server.alive, seconds=10, what="the server ended by itself")
    assert server.log_tail() == "here\n"
    server.end(seconds=1)
    with pytest.raises(ProcessLookupError):
        os.kill(server.pid, 0)
