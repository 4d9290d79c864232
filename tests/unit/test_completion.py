"""`outbox-relay completion`: the shells themselves complete with its script."""

from __future__ import annotations

import os
import pty
import select
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from outbox_relay.cli.completion import SHELLS
from tests.docs.parsing import parsers
from tests.support.command import inside
from tests.support.installed import absent
from tests.support.wait import NotInTime

pytestmark = pytest.mark.processes

PAGE = Path(__file__).parents[2] / "docs/commands.md"
SECONDS = 30
SEARCHED = {name: value for name, value in os.environ.items() if name == "PYTHONPATH"}
"""Where this process finds the package, so that the shells complete the commands of the same one."""
COMMANDS = {
    "bash": ("bash", "--noprofile", "--norc", "-i"),
    "zsh": ("zsh", "-f", "-i"),
    "fish": ("fish", "--no-config", "-i"),
}
PREPARE = {"bash": "", "zsh": "autoload -U compinit; compinit -u; ", "fish": ""}
LOAD = {
    "bash": 'eval "$(outbox-relay completion bash)"',
    "zsh": 'eval "$(outbox-relay completion zsh)"',
    "fish": "outbox-relay completion fish | source",
}
"""The lines of docs/commands.md that load the script."""
TAB, HOME_KEY = "\t", "\x01"


class Terminal:
    """A shell at a terminal, in a directory."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._shown = ""

    def type(self, keys: str) -> None:
        """Press keys."""
        os.write(self._descriptor, keys.encode())

    def shows(self, text: str) -> None:
        """Wait until the terminal shows this text."""
        deadline = time.monotonic() + SECONDS
        while text not in self._shown:
            ready, _, _ = select.select([self._descriptor], [], [], max(0, deadline - time.monotonic()))
            if not ready:
                raise NotInTime(f"{text!r} is not shown, but {self._shown!r}")
            self._shown += os.read(self._descriptor, 1 << 16).decode(errors="replace")


@contextmanager
def terminal(shell: str, place: Path) -> Generator[Terminal]:
    """Run a shell in a directory, with the script loaded."""
    if not shutil.which(shell):
        absent(shell, shell)
    ours, theirs = pty.openpty()
    programs = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    process = subprocess.Popen(
        ["/usr/bin/setsid", "--ctty", *COMMANDS[shell]],  # fish wants a terminal of its own
        cwd=place,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={"PATH": programs, "HOME": str(place), "TERM": "dumb", "LC_ALL": "C.UTF-8", **SEARCHED},
    )
    os.close(theirs)
    try:
        found = Terminal(ours)
        found.type(f"{PREPARE[shell]}{LOAD[shell]}; echo lo''aded\n")
        found.shows("loaded")
        yield found
    finally:
        process.kill()
        process.wait(SECONDS)
        os.close(ours)


@pytest.mark.parametrize("shell", SHELLS)
def test_a_shell_completes_commands_options_and_files(shell: str, tmp_path: Path) -> None:
    assert f"`{LOAD[shell]}`" in PAGE.read_text().replace("\\|", "|")
    (tmp_path / "relay.toml").touch()
    with terminal(shell, tmp_path) as screen:
        for typed, completed in [
            ("replay sta", "replay start"),
            ("dev --pos", "dev --postgres-port"),
            ("demo --fault pois", "demo --fault poison"),
            ("run -c rel", "run -c relay.toml"),
        ]:
            screen.type(f"outbox-relay {typed}{TAB}{HOME_KEY}echo @\n")
            screen.shows(f"@outbox-relay {completed}")


def completed(*words: str) -> list[str]:
    """Return what the function of bash finds for the last word."""
    listed = " ".join(map(shlex.quote, words))
    function = "COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); _shtab_outbox_relay 2>/dev/null"
    script = inside("completion", "bash").out
    text = f"{script}\nCOMP_WORDS=(outbox-relay {listed}); {function}; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    done = subprocess.run(
        ["/bin/bash", "--norc", "-c", text], capture_output=True, check=True, text=True, timeout=SECONDS
    )
    return sorted(done.stdout.split())


def test_every_command_is_completed() -> None:
    wanted: dict[str, Sequence[str]] = {}
    for first, *rest in map(str.split, parsers()):
        wanted[first] = [*wanted.get(first, ()), *rest]
    assert completed("") == sorted(wanted)
    for group in (name for name, actions in wanted.items() if actions):
        assert completed(group, "") == sorted(wanted[group])
