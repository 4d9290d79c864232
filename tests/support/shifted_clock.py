"""Processes whose wall clock is wrong."""

from __future__ import annotations

from pathlib import Path

from tests.support.installed import absent


def library() -> Path:
    """Return the path of libfaketime; without it skip the test, or fail it if the environment variable CI is "true"."""
    found = next(iter(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1")), None)
    if found is None:
        absent("libfaketime", "faketime")
    return found


def shifted(seconds: int) -> dict[str, str]:
    """Return the environment of a process whose wall clock is wrong, and whose monotonic clock is not."""
    return {
        "LD_PRELOAD": str(library()),
        "FAKETIME": f"{seconds:+d}s",
        "DONT_FAKE_MONOTONIC": "1",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
    }
