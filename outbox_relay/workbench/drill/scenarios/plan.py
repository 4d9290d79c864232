"""A drill: its fault, and the judgement of what the fault may have done."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from outbox_relay.workbench.drill.environment import DrillEnvironment
from outbox_relay.workbench.drill.judgement import Check, Evidence, Repeats

Judge = Callable[[Mapping[str, Evidence]], list[Check]]


@dataclass(frozen=True)
class Fault:
    """An injected fault. `judge` compares the evidence of all sinks with the promises of this drill.

    `repeats` has the duplicates that the fault explains, by sink, and `exempt` the uids of events that left the order.
    """

    judge: Judge
    repeats: Mapping[str, Repeats] = field(default_factory=dict[str, Repeats])
    exempt: Mapping[str, AbstractSet[str]] = field(default_factory=dict[str, AbstractSet[str]])


@dataclass(frozen=True)
class DrillPlan:
    """A drill by its name. `inject` makes the fault and returns when its end has been seen, or a limit has passed."""

    name: str
    text: str
    inject: Callable[[DrillEnvironment, float], Fault]
    """Called with the environment and the seconds of grace."""
    standby: bool = False
