"""Programs of wheels are found, and copied if the account cannot run them in place."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from outbox_relay.workbench.embedded import account, postgres
from outbox_relay.workbench.embedded.account import CURRENT, Account


@pytest.fixture
def barred(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forbid every account to run a program in place."""

    def can_run(_account: Account, *_command: str | Path) -> bool:
        return False

    monkeypatch.setattr(Account, "can_run", can_run)


def version(program: str | Path) -> str:
    return subprocess.run([program, "--version"], check=True, capture_output=True, text=True, timeout=20).stdout


@pytest.mark.processes
def test_programs_of_the_wheel_are_run_in_place(tmp_path: Path) -> None:
    assert "18" in version(postgres.wheel_programs(CURRENT, tmp_path) / "postgres")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.processes
@pytest.mark.usefixtures("barred")
def test_unreachable_programs_are_copied(tmp_path: Path) -> None:
    programs = postgres.wheel_programs(CURRENT, tmp_path)
    assert programs.is_relative_to(tmp_path)
    assert "18" in version(programs / "postgres")


def test_postgresql_of_root_runs_as_another_account(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(account.os, "geteuid", lambda: 0)
    lent = account.unprivileged()
    assert lent.user
    assert lent.extra_groups == ()
    monkeypatch.setattr(account, "CANDIDATES", ("no such user",))
    with pytest.raises(RuntimeError, match="add a user with one of the names"):
        account.unprivileged()
