"""The settings that every table ``[sinks.NAME]`` takes, whatever its type, and those of every plug-in."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import Field, field_validator

from outbox_relay.domain.circuit import CircuitPolicy
from outbox_relay.domain.outcomes import RetryPolicy
from outbox_relay.fields import Count, Number, Section, matching, needs, rule

SHOWN: Final = "shown"
"""Marks a text of a plug-in's settings that `config show` may print: ``stream: Annotated[str, SHOWN]``."""
LEAST_RATE = 0.01
_TOO_SLOW = f"should be 0, for no limit, or at least {LEAST_RATE:g}"


def _below(most: str, first: str, policy: object) -> str | None:
    """Return why the longest delay of a policy cannot be shorter than the first, if it is."""
    is_below = getattr(policy, f"{most}_seconds") < getattr(policy, f"{first}_seconds")
    return f"{most}_seconds should not be below {first}_seconds" if is_below else None


def _usual_pending(earlier: Mapping[str, Any]) -> int:
    return 10_000_000 if earlier.get("claim") == "rows" else 100_000


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
    pending_max: Count = Field(default_factory=_usual_pending, ge=1, le=1_000_000_000)
    """Events that wait as rows before the sink waits, 1 to 1000000000; spread events do not count.

    By default 100000, with claim = "rows" 10000000.
    """
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
    retry: Annotated[RetryPolicy, rule(lambda each, _: _below("max", "base", each))] = Field(
        default_factory=RetryPolicy
    )
    """The delays before a failed event is tried again."""
    circuit: Annotated[CircuitPolicy, rule(lambda each, _: _below("probe_max", "probe", each))] = Field(
        default_factory=CircuitPolicy
    )
    """When the sink stops because its destination is down, and the pace of its probes."""


class TlsSettings(Section):
    """Certificates of a connection over TLS."""

    ca_file: Path | None = None
    """A PEM file with the authorities that the other side is verified by, instead of the system's."""
    client_certificate: Path | None = None
    """A PEM file with the certificate that the relay presents, and those between it and its authority."""
    client_key: Annotated[Path | None, needs("client_certificate")] = None
    """A PEM file with the key of client_certificate, not encrypted; by default in the same file."""


class CallSettings(SinkSettings):
    """The settings of a sink that delivers one event at a time."""

    timeout_seconds: Number = Field(default=15.0, gt=0, le=3600)
    """Longest time for one call or request, in seconds, above 0 and at most 3600, of a webhook at most 60."""


class RequestSettings(CallSettings):
    """The settings of a sink with many calls at once."""

    max_in_flight: Count = Field(default=64, ge=1, le=4096)
    """Most concurrent calls or requests of one relay, 1 to 4096."""


class PluginSettings(CallSettings):
    """The settings of every plug-in, to which its model adds its own.

    `config show` prints numbers, flags and choices (``Literal``) of a plug-in, and of its texts those marked ``SHOWN``.
    A password is a ``SecretStr``: then a file that holds it, and that others can read, is reported.
    """

    @field_validator("cloudevents")
    @classmethod
    def _is_none(cls, value: str) -> str:
        if value != "none":
            raise ValueError("has no effect: a plug-in gets the event itself")
        return value
