"""A logger that keeps its lines."""

from __future__ import annotations

from typing import Any

import structlog
from structlog.stdlib import BoundLogger
from structlog.typing import EventDict


class RecordedLog(BoundLogger):
    """A logger that keeps its lines as (level, event, values) and writes none."""

    def __init__(self) -> None:
        super().__init__(None, [self._record], {})
        self.lines: list[tuple[str, str, dict[str, Any]]] = []

    @property
    def warnings(self) -> list[tuple[str, dict[str, Any]]]:
        """The event and the values of every warning."""
        return [(event, values) for level, event, values in self.lines if level == "warning"]

    def _record(self, _logger: object, level: str, line: EventDict) -> EventDict:
        values = {name: value for name, value in line.items() if name != "event"}
        self.lines.append((level, line["event"], values))
        raise structlog.DropEvent
