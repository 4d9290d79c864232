"""What every table ``[sinks.NAME]`` can be told, whatever its type."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import Field, ValidationInfo, field_validator

from outbox_relay.domain.outcomes import RetryPolicy
from outbox_relay.settings.fields import Count, Number, Section

_URI_REFERENCE = re.compile(r"(?:[-A-Za-z0-9._~:/?#\[\]@!$&'()*+,;=]|%[0-9A-Fa-f]{2})+")


class RetrySettings(Section):
    """When an event that failed is tried again: ``base_seconds``·2ⁿ up to ``max_seconds``, give or take ``jitter``."""

    attempts: Count = Field(default=30, ge=1, le=10_000)
    """Attempts before an event is dead, 1 to 10000."""
    base_seconds: Number = Field(default=1.0, gt=0, le=86_400)
    """Delay after the first failure, doubled after each further one, in seconds, above 0 and at most 86400."""
    max_seconds: Number = Field(default=3600.0, gt=0, le=604_800, validate_default=True)
    """Longest delay, in seconds, base_seconds to 604800."""
    jitter: Number = Field(default=0.2, ge=0, le=1)
    """Part of a delay by which it is made shorter or longer at random, 0 to 1."""

    @field_validator("max_seconds")
    @classmethod
    def _not_below_base(cls, value: float, info: ValidationInfo) -> float:
        return _not_below(value, "base_seconds", info)


class CircuitSettings(Section):
    """When a sink is left alone because its destination is down, and how it is probed."""

    open_after: Count = Field(default=20, ge=1, le=10_000)
    """Failures in a row, of different events, after which the sink pauses, 1 to 10000."""
    probe_seconds: Number = Field(default=1.0, gt=0, le=3600)
    """Time to the first probe, doubled after each further one, in seconds, above 0 and at most 3600."""
    probe_max_seconds: Number = Field(default=60.0, gt=0, le=86_400, validate_default=True)
    """Longest time between probes, in seconds, probe_seconds to 86400."""
    pause_after_seconds: Number = Field(default=432_000.0, ge=0, le=31_536_000)
    """How long a destination may be down until the sink is paused and a person resumes it, in seconds; 0: never."""

    @field_validator("probe_max_seconds")
    @classmethod
    def _not_below_first(cls, value: float, info: ValidationInfo) -> float:
        return _not_below(value, "probe_seconds", info)


def _not_below(value: float, other: str, info: ValidationInfo) -> float:
    least = info.data.get(other)
    if least is not None and value < least:
        raise ValueError(f"is {value:g}, should not be below {other}, which is {least:g}")
    return value


class SinkSettings(Section):
    """What every sink has."""

    order: Literal["key", "none"] = "key"
    """Whether events of one key arrive in the order of their commits ("key") or as they come ("none")."""
    start: Literal["beginning", "now"] | None = None
    """Where a sink that the database does not know yet begins; left out: "beginning" for the first sinks of a database,
    "now" for later ones."""
    when_dead: Literal["skip", "hold"] = "skip"
    """Whether later events of a key go on after a dead letter of it ("skip") or wait for a person ("hold")."""
    parked_max: Count = Field(default=100_000, ge=1, le=10_000_000)
    """Events that wait as rows, because they failed or an earlier event of their key did, 1 to 10000000; from then on
    the sink stands still until some of them are delivered or dead. Scheduled events do not count."""
    cloudevents: Literal["none", "binary", "structured"] = "none"
    """Whether events are sent as CloudEvents: attributes beside the payload ("binary") or around it ("structured")."""
    cloudevents_source: str = Field(default="/outbox-relay", min_length=1, max_length=1024)
    """Where CloudEvents say that they come from: a URI or the path of one, 1 to 1024 characters."""
    retry: RetrySettings = Field(default_factory=RetrySettings)
    circuit: CircuitSettings = Field(default_factory=CircuitSettings)

    @field_validator("cloudevents_source")
    @classmethod
    def _is_uri_reference(cls, value: str) -> str:
        if not _URI_REFERENCE.fullmatch(value):
            raise ValueError("should be a URI or the path of one: letters, digits and -._~:/?#[]@!$&'()*+,;= or %XX")
        return value

    def retry_policy(self) -> RetryPolicy:
        """The table ``retry`` as the value that decisions are made with."""
        return RetryPolicy(self.retry.attempts, self.retry.base_seconds, self.retry.max_seconds, self.retry.jitter)
