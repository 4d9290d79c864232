"""Runs schedules: ``python -m tests.simulation SECONDS [SEED]``, or ``python -m tests.simulation fences [NAME …]``."""

from __future__ import annotations

import copy
import os
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

from tests.simulation.world import World


def search(
    seconds: float, first: int = 1, clock: Callable[[], float] = time.process_time, **schedules: Any
) -> tuple[int, int | None, BaseException | None]:
    """Run schedules for some seconds, or until one fails. Return how many, and the failing seed and its error."""
    end, seed = clock() + seconds, first
    while clock() < end:
        try:
            World(seed, **copy.deepcopy(schedules)).run()
        except Exception as error:
            return seed - first + 1, seed, error
        seed += 1
    return seed - first, None, None


def show(seed: int, last: int) -> None:
    """Print the last steps of a schedule, and how it ends."""
    world = World(seed, is_noted=True)
    try:
        world.run()
    except Exception:
        print("\n".join(world.notes[-last:]))
        traceback.print_exc()
    else:
        print(f"seed {seed}: nothing is wrong")


def main(arguments: list[str]) -> int:
    """Run, and return the exit code."""
    if arguments and arguments[0] == "fences":
        from tests.simulation.fences import try_all

        return try_all(arguments[1:])
    seconds = float(arguments[0]) if arguments else 20.0
    if len(arguments) > 1:
        show(int(arguments[1]), int(arguments[2]) if len(arguments) > 2 else 200)
        return 0
    count, seed, error = search(seconds, clock=time.perf_counter)
    print(f"{count} schedules, {count / seconds * 60:.0f} a minute")
    if seed is not None:
        print(f"seed {seed}: {error!r}")
        show(seed, 100)
    return seed is not None


if __name__ == "__main__":
    if os.environ.get("PYTHONHASHSEED") != "0":  # the order of a set of keys is part of a schedule
        command = [sys.executable, "-m", "tests.simulation", *sys.argv[1:]]
        os.execve(sys.executable, command, {**os.environ, "PYTHONHASHSEED": "0"})
    sys.exit(main(sys.argv[1:]))
