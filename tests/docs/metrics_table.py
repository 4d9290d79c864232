"""The table of metrics of docs/observability.md."""

from __future__ import annotations

import re
from typing import NamedTuple

from tests.docs.pages import text

PAGE = "docs/observability.md"
ROW = re.compile(r"^\| `(outbox_\w+)` \| (\w+) \| (\w*) \| ([^|]*) \| (.+?) \| `([^|]+)` \|$", re.MULTILINE)


class Listed(NamedTuple):
    """A row of the page."""

    name: str
    type: str
    unit: str
    labels: tuple[str, ...]
    meaning: str
    query: str


def listed() -> list[Listed]:
    """Return every row of the page's table."""
    rows = [Listed(row[1], row[2], row[3], tuple(re.findall(r"`(\w+)`", row[4])), row[5], row[6]) for row in found()]
    assert len(rows) == len(re.findall(r"^\| `outbox_", text(PAGE), re.MULTILINE)), "a row that is not read"
    return rows


def found() -> list[re.Match[str]]:
    return list(ROW.finditer(text(PAGE)))
