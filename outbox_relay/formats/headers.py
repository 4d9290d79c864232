"""The headers of an event."""

from __future__ import annotations

import json
from typing import cast

_STRINGS: frozenset[type] = frozenset((str,))


def own_headers(text: str | None) -> list[tuple[str, str]]:
    """Return the headers in ``text``, a value of ``StoredEvent.headers``; empty for None.

    Raises ValueError, without repeating a header, if ``text`` is not a JSON object of strings.
    """
    if text is None:
        return []
    try:
        found: object = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if isinstance(found, dict):
        headers = cast("dict[str, str]", found)
        if _STRINGS.issuperset(map(type, headers.values())):
            return list(headers.items())
    raise ValueError("the event's headers are not a JSON object of strings")
