"""What a reload applies, and which settings differ between two configurations. No value passes through here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import cast

from pydantic import BaseModel

from outbox_relay.settings.model import Settings
from outbox_relay.settings.problems import Path, place
from outbox_relay.settings.shape import fields

APPLIED: tuple[Path, ...] = (
    ("routes",),
    # Says where a sink begins that the database does not know: of no effect for one that runs, also after a restart.
    ("sinks", "*", "start"),
    ("sinks", "*", "secrets"),
    ("sinks", "*", "secrets_file"),
    ("sinks", "*", "headers"),
    ("sinks", "*", "proxy_authorization_file"),
    ("sinks", "*", "producer"),
    ("sinks", "*", "producer_files"),
)
"""Settings that a reload applies, with everything below them; a star is any name."""


def differing(old: Settings, new: Settings) -> list[Path]:
    """Return the paths of the settings whose values differ, in the order of the models."""
    return list(_differing((), old, new))


def restart_needed(old: Settings, new: Settings) -> list[str]:
    """Return a line for each setting that differs and that a reload does not apply; no value stands in it."""
    return [_line(old, new, path) for path in differing(old, new) if not _is_applied(path)]


def _line(old: Settings, new: Settings, path: Path) -> str:
    match path:
        case ("sinks", name) if name not in new.sinks:
            return f"{place(path)}: was removed: needs a restart"
        case ("sinks", name) if name not in old.sinks:
            return new.at(path, "was added: needs a restart")
        case _:
            return new.at(path, "needs a restart")


def _is_applied(path: Path) -> bool:
    return any(
        len(path) >= len(applied) and all(step in ("*", mine) for step, mine in zip(applied, path, strict=False))
        for applied in APPLIED
    )


def _differing(path: Path, old: object, new: object) -> Iterator[Path]:
    if isinstance(old, BaseModel) and isinstance(new, BaseModel):
        if type(old) is not type(new):
            yield (*path, "type")
            return
        for name in fields(type(old)):
            yield from _differing((*path, name), _value(old, name), _value(new, name))
    elif isinstance(old, Mapping) and isinstance(new, Mapping):
        olds, news = cast("Mapping[str, object]", old), cast("Mapping[str, object]", new)
        for name in {**olds, **news}:
            if name not in olds or name not in news:
                yield (*path, name)
            else:
                yield from _differing((*path, name), olds[name], news[name])
    elif old != new:
        yield path


def _value(model: BaseModel, name: str) -> object:
    """Return the value of the field that the file calls ``name``."""
    return next(
        getattr(model, attribute)
        for attribute, field in type(model).model_fields.items()
        if name == (field.alias or attribute)
    )
