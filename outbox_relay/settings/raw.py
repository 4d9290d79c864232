"""Values as they come out of TOML or JSON, before anything is known of them."""

from __future__ import annotations

from typing import Any, cast


def table(value: object) -> dict[str, Any] | None:
    """``value`` if it is a table, whose names are strings in TOML and JSON alike; otherwise nothing."""
    return cast(dict[str, Any], value) if isinstance(value, dict) else None


def items(value: object) -> list[Any] | None:
    """``value`` if it is a list, otherwise nothing."""
    return cast(list[Any], value) if isinstance(value, list) else None
