"""Frames between the relay and a worker process: two lengths, a JSON list, and bytes. Pure.

The first value of the list is the kind of the frame, and the others are its items: calls, answers, or numbers. Items of
one kind that are sent together share a frame, since most of its cost is per frame. Nothing of a frame is executed or
unpickled, and each length is checked before memory is used for it.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple, TypeAlias, cast

LENGTHS: Final = struct.Struct("!II")
MOST_PAYLOAD = 1 << 30
"""Maximum bytes of a payload, which PostgreSQL's limit of a value is below."""
MOST_HEAD, MOST_BODY = 16 << 20, MOST_PAYLOAD + (1 << 20)
"""Maximum bytes of the list and of the bytes of a frame to a worker."""
MOST_ANSWER = 64 << 10
"""Maximum bytes of the list of a frame from a worker, which has no bytes besides."""

PIECE_BYTES: Final = 32 << 10
"""Bytes of items and bodies from which on a frame takes no other item."""

Plain: TypeAlias = str | int | float | bool | None
_encode = json.JSONEncoder(check_circular=False, separators=(",", ":")).encode


class BadFrame(ValueError):
    """Bytes that are no frame, or a larger one than is allowed. What follows them cannot be read."""


class Frame(NamedTuple):
    """A frame: its kind, its items, and the bytes."""

    kind: str
    items: list[Any]
    body: bytes


def item(*values: Plain, body: bytes = b"") -> bytes:
    """Return an item of a frame that is a list. Raises ``BadFrame`` if it or its ``body`` is too large."""
    if len(body) > MOST_PAYLOAD:
        raise BadFrame(f"a payload has at most {MOST_PAYLOAD} bytes")
    text = _encode(values)
    if len(text) > MOST_HEAD - PIECE_BYTES - 64:
        raise BadFrame(f"an event has at most {MOST_HEAD} bytes besides its payload")
    return text.encode()


def frame(kind: str, items: Sequence[bytes], bodies: Sequence[bytes] = ()) -> bytes:
    """Return a frame as bytes. ``items`` are JSON. Raises ``BadFrame`` if it is too large."""
    head, body = b'["%s",%s]' % (kind.encode(), b",".join(items)), b"".join(bodies)
    if len(head) > MOST_HEAD or len(body) > MOST_BODY:
        raise BadFrame(f"a frame has at most {MOST_HEAD} bytes of values and {MOST_BODY} of payload")
    return b"".join((LENGTHS.pack(len(head), len(body)), head, body))


class FrameReader:
    """Reads frames from pieces of any size."""

    def __init__(self, most_head: int = MOST_HEAD, most_body: int = MOST_BODY) -> None:
        self._most = most_head, most_body
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Yield the frames that are complete with ``data``. Raises ``BadFrame``."""
        self._buffer += data
        start = 0
        try:
            while len(self._buffer) - start >= LENGTHS.size:
                head_bytes, body_bytes = LENGTHS.unpack_from(self._buffer, start)
                if head_bytes > self._most[0] or body_bytes > self._most[1]:
                    raise BadFrame("a frame is larger than allowed")
                first = start + LENGTHS.size
                middle, end = first + head_bytes, first + head_bytes + body_bytes
                if len(self._buffer) < end:
                    return
                with memoryview(self._buffer) as view:
                    head, body = bytes(view[first:middle]), bytes(view[middle:end])
                start = end
                yield _frame(head, body)
        finally:
            del self._buffer[:start]


def _frame(head: bytes, body: bytes) -> Frame:
    try:
        found: object = json.loads(head)
    except (ValueError, RecursionError):
        raise BadFrame("a frame holds no JSON") from None
    if not isinstance(found, list) or not found or not isinstance(found[0], str):
        raise BadFrame("a frame is no list that begins with its kind")
    values = cast("Sequence[Any]", found)
    return Frame(values[0], list(values[1:]), body)
