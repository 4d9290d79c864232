"""Definition of a scenario."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tests.bench.environment import BenchEnvironment
from tests.bench.figures import Figure


@dataclass(frozen=True, slots=True)
class Scenario:
    """A measurement; `measure` runs it once in an environment.

    `quick` scenarios are part of `--quick`; any scenario can be named. `max_runs` limits the number of runs.
    """

    name: str
    text: str
    """Description for the report."""
    measure: Callable[[BenchEnvironment], Sequence[Figure]]
    quick: bool = False
    max_runs: int = 100
