"""The shape of a scenario."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from outbox_relay.workbench.bench.environment import BenchEnvironment
from outbox_relay.workbench.bench.figures import Figure


@dataclass(frozen=True, slots=True)
class Scenario:
    """One thing that is measured. `measure` is one run of it; what it starts ends with the run.

    `quick` says whether it is part of `--quick`; whoever names it gets it in any case. `runs_most` bounds its runs.
    """

    name: str
    text: str
    """What is measured, for whoever reads the figures."""
    measure: Callable[[BenchEnvironment], Sequence[Figure]]
    quick: bool = False
    runs_most: int = 100
