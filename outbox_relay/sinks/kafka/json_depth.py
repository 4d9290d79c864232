"""The depth of JSON, judged before it is parsed. What encodes it recurses, and some of it in C without a limit."""

from __future__ import annotations

import re

MAX_DEPTH = 100
"""Maximum number of arrays and objects that lie in each other."""

_STRING_OR_BRACKET = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"?|[\[\]{}]', re.DOTALL)
"""A string, also one without an end: the rest of it is not searched again from each of its quotes."""


def is_too_deep(text: str) -> bool:
    """Return True if ``text`` has more than ``MAX_DEPTH`` arrays and objects in each other."""
    if text.count("[") + text.count("{") <= MAX_DEPTH:
        return False
    depth = 0
    for found in _STRING_OR_BRACKET.finditer(text):
        match text[found.start()]:
            case "[" | "{":
                depth += 1
                if depth > MAX_DEPTH:
                    return True
            case "]" | "}":
                depth -= 1
            case _:
                pass
    return False
