"""The settings that every table ``[sinks.NAME]`` takes, whatever its type, and those of every plug-in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

from pydantic import Field, field_validator

from outbox_relay.fields import Count, Number, Section, matching, not_below, rule

SHOWN: Final = "shown"
"""Marks a text of a plug-in's settings that `config show` may print: ``stream: Annotated[str, SHOWN]``."""
LEAST_RATE = 0.01
_TOO_SLOW = f"should be 0, for no limit, or at least {LEAST_RATE:g}"


class RetrySettings(Section):
    """Delays before a failed event is tried again: ``base_seconds``·2ⁿ to ``max_seconds``, ± ``jitter``."""

    attempts: Count = Field(default=30, ge=1, le=10_000)
    """Attempts before an event is dead, 1 to 10000."""
    base_seconds: Number = Field(default=1.0, gt=0, le=86_400)
    """Delay after the first failure, doubled after each further one, in seconds, above 0 and at most 86400."""
    max_seconds: Annotated[Number, not_below("base_seconds")] = Field(
        default=3600.0, gt=0, le=604_800, validate_default=True
    )
    """Longest delay, in seconds, base_seconds to 604800."""
    jitter: Number = Field(default=0.2, ge=0, le=1)
    """Part of a delay by which it is made shorter or longer at random, 0 to 1."""


class CircuitSettings(Section):
    """Conditions under which a sink pauses because its destination is down, and the pace of its probes."""

    open_after: Count = Field(default=20, ge=1, le=10_000)
    """Failures and refusals in a row, of different events, after which the circuit opens, 1 to 10000."""
    probe_seconds: Number = Field(default=1.0, gt=0, le=3600)
    """Time to the first probe, doubled after each further one, in seconds, above 0 and at most 3600."""
    probe_max_seconds: Annotated[Number, not_below("probe_seconds")] = Field(
        default=60.0, gt=0, le=86_400, validate_default=True
    )
    """Longest time between probes, in seconds, probe_seconds to 86400."""
    pause_after_seconds: Number = Field(default=432_000.0, ge=0, le=31_536_000)
    """Time for which a destination may be down before its sink is paused until `resume`, in seconds; 0: never."""


def _usual_order(earlier: Mapping[str, Any]) -> Literal["key", "none"]:
    return "none" if earlier.get("claim") == "rows" else "key"


class SinkSettings(Section):
    """The settings of every sink."""

    type: str
    """The kind of sink."""
    claim: Literal["log", "rows"] = "log"
    """Deliver events from the log ("log"), or make each a row, which relays claim by priority ("rows")."""
    order: Annotated[
        Literal["key", "none"],
        rule(
            lambda value, earlier: (
                'is "key", which claim = "rows" does not keep: give "none", or leave it out'
                if value == "key" and earlier.get("claim") == "rows"
                else None
            )
        ),
    ] = Field(default_factory=_usual_order)
    """Order of events: of one key, as they were committed ("key"), or as they come ("none")."""
    start: Literal["beginning", "now"] | None = None
    """Start of a sink that is new to the database; by default "now", for the first sinks "beginning"."""
    when_dead: Literal["skip", "hold"] = "skip"
    """After a dead letter, later events of its key continue ("skip") or wait for a person ("hold")."""
    parked_max: Count = Field(default=100_000, ge=1, le=10_000_000)
    """Events that wait as rows before the sink pauses, 1 to 10000000; spread events do not count."""
    rows_max: Count = Field(default=10_000_000, ge=1, le=1_000_000_000)
    """The same with claim = "rows", instead of parked_max, 1 to 1000000000."""
    fair_by: Annotated[
        Literal["tenant", ""],
        rule(
            lambda value, earlier: (
                'needs claim = "rows": events of the log have no turns'
                if value and earlier.get("claim", "rows") != "rows"
                else None
            )
        ),
    ] = ""
    """With claim = "rows", let tenants take turns, before priorities count ("tenant"); empty: no turns."""
    rate_per_second: Annotated[Number, rule(lambda rate, _: _TOO_SLOW if 0 < rate < LEAST_RATE else None)] = Field(
        default=0.0, ge=0, le=100_000
    )
    """Most events per second of all relays together, 0.01 to 100000; 0: no limit."""
    max_in_flight_total: Count = Field(default=0, ge=0, le=100_000)
    """Most concurrent requests of all relays together, 1 to 100000; 0: no limit."""
    spread_seconds: Number = Field(default=0.0, ge=0, le=86_400)
    """Time over which scheduled events of one moment are spread, in seconds, 0 to 86400; 0: none."""
    record_attempts: Literal["failures", "none", "all"] = "failures"
    """Attempts that are recorded: failed ones and the delivery that follows them ("failures"), "none", or "all"."""
    cloudevents: Literal["none", "binary", "structured"] = "none"
    """Send events as CloudEvents, with attributes in headers ("binary") or around the payload ("structured")."""
    cloudevents_source: Annotated[
        str,
        matching(
            r"(?:[-A-Za-z0-9._~:/?#\[\]@!$&'()*+,;=]|%[0-9A-Fa-f]{2})+",
            "should be a URI or the path of one: letters, digits and -._~:/?#[]@!$&'()*+,;= or %XX",
        ),
    ] = Field(default="/outbox-relay", min_length=1, max_length=1024)
    """The source that CloudEvents name: a URI or the path of one, 1 to 1024 characters."""
    retry: RetrySettings = Field(default_factory=RetrySettings)
    circuit: CircuitSettings = Field(default_factory=CircuitSettings)


class PluginSettings(SinkSettings):
    """The settings of every plug-in, to which its model adds its own.

    `config show` prints numbers, flags and choices (``Literal``) of a plug-in, and of its texts those marked ``SHOWN``.
    A password is a ``SecretStr``: then a file that holds it, and that others can read, is reported.
    """

    timeout_seconds: Number = Field(default=15.0, gt=0, le=3600)
    """Longest time for one call of the plug-in, in seconds, above 0 and at most 3600."""

    @field_validator("cloudevents")
    @classmethod
    def _is_none(cls, value: str) -> str:
        if value != "none":
            raise ValueError("has no effect: a plug-in gets the event itself")
        return value
