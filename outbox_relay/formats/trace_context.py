"""The trace context of an event: the header ``traceparent`` of W3C Trace Context. Pure."""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from outbox_relay.formats.headers import own_headers

TRACEPARENT: Final = "traceparent"
TRACESTATE: Final = "tracestate"
STATE_MAX_CHARS: Final = 512
"""Longest ``tracestate`` that is used."""
SAMPLED: Final = 1
"""The flag of a context whose span was recorded."""

_PARENT = re.compile(r"(?P<version>[0-9a-f]{2})-(?P<trace>[0-9a-f]{32})-(?P<span>[0-9a-f]{16})-(?P<flags>[0-9a-f]{2})")
_VERSION, _INVALID_VERSION = "00", "ff"


class TraceContext(NamedTuple):
    """The span that created an event. Both ids are lower-case hexadecimal numbers other than 0."""

    trace_id: str
    span_id: str
    flags: int
    state: str = ""
    """The value of ``tracestate`` as emitted, or an empty text."""

    @property
    def sampled(self) -> bool:
        """True if the span was recorded, as far as its creator knew."""
        return bool(self.flags & SAMPLED)


def trace_context(headers: str | None) -> TraceContext | None:
    """Return the trace context in ``headers``, a value of ``StoredEvent.headers``.

    Return None if there is none or if it is not valid. The headers are any text that an application emitted.
    """
    if headers is None or TRACEPARENT not in headers.lower():
        return None
    try:
        named = {name.lower(): value for name, value in own_headers(headers)}
    except ValueError:
        return None
    return _parsed(named.get(TRACEPARENT, "").strip(" \t"), named.get(TRACESTATE, ""))


def _parsed(parent: str, state: str) -> TraceContext | None:
    """Return the context in ``parent``. Later versions may append fields to those of version 00."""
    found = _PARENT.match(parent)
    if found is None or found["version"] == _INVALID_VERSION:
        return None
    rest = parent[found.end() :]
    if rest and (found["version"] == _VERSION or not rest.startswith("-")):
        return None
    if not (found["trace"].strip("0") and found["span"].strip("0")):
        return None
    return TraceContext(
        found["trace"], found["span"], int(found["flags"], 16), state if len(state) <= STATE_MAX_CHARS else ""
    )


def trace_id(headers: str | None) -> str | None:
    """Return the id of the trace in which an event was created, or None. It takes ``headers`` as ``trace_context``."""
    context = trace_context(headers)
    return None if context is None else context.trace_id
