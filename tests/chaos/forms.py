"""The two forms of the suite: which faults are injected how often, the emit rate, and the required counts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

LEASE_SECONDS = 3


@dataclass(frozen=True)
class Form:
    """The parameters of a run."""

    name: str
    relays: int
    writers: int
    rate: float
    """Emit rate of all writers together, in events per second."""
    keys: int
    alone: Mapping[str, int]
    """Fault → number of strikes without any other fault, with time to recover, to measure the recovery."""
    storm_seconds: float
    """Duration of the phase in which all lanes inject in parallel."""
    lanes: Mapping[str, Mapping[str, int]]
    """Lane → fault → number of strikes. A lane injects one fault at a time, in an order that depends on the seed."""
    least: Mapping[str, int]
    """First words of a fault → required number of strikes."""
    least_events: int
    least_jobs: int
    """Required number of events with unique keys, of merged ones, and of times of schedules."""
    extra_seconds: float
    """Additional time for the storm if the required counts are not reached."""
    rest_seconds: float
    """Time limit for the system to deliver everything at the end."""
    start_seconds: float = 3.0
    """Time before the first relay is replaced."""


SHORT = Form(
    name="short",
    relays=4,
    writers=4,
    rate=1_000.0,
    keys=2_000,
    alone={"sigkill": 3, "postgres crash": 2, "blackholed connection": 1},
    storm_seconds=110.0,
    lanes={
        "relays killed": {"sigkill": 12, "sigkill after acknowledgement": 5, "sigkill inside settle": 5},
        "relays killed as they join": {"sigkill after claim": 3},
        "relays frozen": {"zombie": 6},
        "relays replaced": {"sigterm": 6, "join and leave": 2},
        "relays asked": {"reload": 5, "health flood": 3},
        "inputs": {"poison": 6, "retention": 3},
        "replays": {"replay": 8},
        "transactions": {"huge transaction": 2, "long transaction": 2, "held snapshot": 2},
        "database": {
            "backend killed": 18,
            "postgres crash": 2,
            "promotion": 1,
            "hanging commit": 1,
            "too many connections": 1,
            "hostile role defaults": 2,
            "statements cancelled": 2,
            "table locked": 1,
            "statistics reset": 2,
        },
        "disasters": {"restore": 1},
        "broker": {"broker killed": 2, "broker stopped": 1},
        "receiver": {"receiver down": 2, "receiver slow": 1, "receiver hanging": 2},
    },
    least={
        "sigkill": 20,
        "zombie": 5,
        "backend killed": 15,
        "postgres crash": 2,
        "promotion": 1,
        "broker": 1,
        "poison": 5,
        "reload": 4,
        "retention": 1,
        "huge transaction": 2,
        "long transaction": 1,
        "held snapshot": 1,
        "health flood": 1,
        "hostile role defaults": 2,
        "statements cancelled": 2,
        "table locked": 1,
        "statistics reset": 2,
        "restore": 1,
        "replay": 4,
    },
    least_events=100_000,
    least_jobs=100,
    extra_seconds=240.0,
    rest_seconds=300.0,
)
LONG = Form(
    name="long",
    relays=4,
    writers=4,
    rate=1_300.0,
    keys=2_000,
    alone={"sigkill": 5, "postgres crash": 5, "promotion": 2, "blackholed connection": 3},
    storm_seconds=2_000.0,
    lanes={
        "relays killed": {"sigkill": 640},
        "relays killed at a point": {"sigkill after acknowledgement": 170, "sigkill inside settle": 170},
        "relays killed as they join": {"sigkill after claim": 60, "join and leave": 30, "clock shifted": 20},
        "relays frozen": {"zombie": 110},
        "relays replaced": {"sigterm": 60},
        "relays asked": {"reload": 60, "health flood": 40},
        "inputs": {"poison": 100, "retention": 15},
        "replays": {"replay": 60},
        "transactions": {"huge transaction": 25, "long transaction": 25, "held snapshot": 25},
        "database": {
            "backend killed": 120,
            "postgres crash": 105,
            "promotion": 20,
            "hanging commit": 10,
            "blackholed connection": 10,
            "too many connections": 20,
            "disk full": 10,
            "hostile role defaults": 15,
            "statements cancelled": 15,
            "table locked": 10,
            "statistics reset": 30,
        },
        "disasters": {"restore": 4, "restore twice": 1},
        "broker": {"broker killed": 40, "broker stopped": 15},
        "receiver": {"receiver down": 40, "receiver slow": 30, "receiver hanging": 30},
    },
    least={
        "sigkill": 1_000,
        "zombie": 100,
        "postgres crash": 100,
        "promotion": 20,
        "broker": 50,
        "clock shifted": 1,
        "poison": 100,
        "reload": 50,
        "retention": 5,
        "huge transaction": 20,
        "long transaction": 20,
        "held snapshot": 20,
        "health flood": 40,
        "hostile role defaults": 15,
        "statements cancelled": 15,
        "table locked": 10,
        "statistics reset": 30,
        "restore": 5,
    },
    least_events=2_000_000,
    least_jobs=1_000,
    extra_seconds=3_600.0,
    rest_seconds=900.0,
)
FORMS: Mapping[str, Form] = {form.name: form for form in (SHORT, LONG)}
