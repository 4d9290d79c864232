"""What the relay writes its log to: the part of a structured logger that it uses."""

from __future__ import annotations

from typing import Any, Protocol


class Log(Protocol):
    """A logger whose lines are an event and values. Never a payload, a header's value, a secret or a DSN."""

    def debug(self, event: str, /, **values: Any) -> Any:
        """For who looks closely."""
        ...

    def info(self, event: str, /, **values: Any) -> Any:
        """For who looks."""
        ...

    def warning(self, event: str, /, **values: Any) -> Any:
        """For who is asked to look."""
        ...
