"""The declaration of one event: its type, its class, and how an instance becomes key and payload."""

from __future__ import annotations

import re
from collections.abc import Callable
from enum import Enum
from importlib.util import find_spec
from typing import Any, Final, TypeVar, cast
from uuid import UUID

from outbox_relay.catalogue.classes import DataclassOrModel, MsgspecStruct
from outbox_relay.emit_rows import DECLARATION, InvalidEvent

C = TypeVar("C", bound=type)

WRONG: Final = re.compile(r"[^\x21-\x29\x2b-\x7e]")
"""A character that no type has."""
MAX_CHARS: Final = 255
RESERVED: Final = "outbox."
NO_CLASS: Final = (
    "{} is no dataclass, pydantic model or msgspec Struct, so its events have no schema; "
    "write @event above @dataclass, and the class below both"
)


class EventDeclaration:
    """The declaration of the class ``of`` as the class of events of one type.

    ``key`` is the name of the attribute that holds the key, or None.
    """

    def __init__(self, event_type: str, of: type, key: str | None) -> None:
        self.type = event_type
        self.of = of
        self.key = key
        self._form = _form(of)

    def key_of(self, instance: object) -> str | None:
        """Return the key of an instance; None without one. Raises ``InvalidEvent``."""
        if self.key is None:
            return None
        value = getattr(instance, self.key)
        if isinstance(value, Enum):
            value = value.value
        if value is None or isinstance(value, str):
            return value
        if isinstance(value, int | UUID) and not isinstance(value, bool):
            return str(value)
        place = f"{self.of.__name__}.{self.key}"
        raise InvalidEvent(f"key must be a str, int or UUID, and {place} is {_article(type(value).__name__)}")

    def payload_of(self, instance: object) -> Any:
        """Return an instance as ``json.dumps`` takes it. Raises ``InvalidEvent``, which names the field at fault."""
        return self._form.payload_of(instance)

    def schema(self, reference: str) -> dict[str, Any]:
        """Return the JSON Schema of the payload.

        ``reference`` is the ``$ref`` of a definition, with ``{name}`` in the place of its name.
        """
        return self._form.schema(reference)


def event(event_type: str, *, key: str | None = None) -> Callable[[C], C]:
    """Declare a class as the class of all events of a type, and return it unchanged.

    ``key`` names the attribute whose value is the event's key: a field or a property, of type str, int or UUID.

    Raises :class:`InvalidEvent` for a type that no event may have, ValueError for a class without the attribute, and
    TypeError for a class that is no dataclass, pydantic model or msgspec Struct.
    """
    _check_type(event_type)

    def declare(of: C) -> C:
        if not isinstance(cast(object, of), type):
            raise TypeError(f"@event declares a class, not {_article(type(of).__name__)}")
        if key is not None and key not in field_names(of) and not hasattr(of, key):
            raise ValueError(f"{of.__name__} has no attribute {key[:60]!r}, which @event names as the key")
        setattr(of, DECLARATION, EventDeclaration(event_type, of, key))
        return of

    return declare


def declaration_of(of: object) -> EventDeclaration | None:
    """Return the declaration of a class itself, not of a base class; None without one."""
    found = of.__dict__.get(DECLARATION) if isinstance(of, type) else None
    return found if isinstance(found, EventDeclaration) else None


def field_names(of: type) -> set[str]:
    """Return the names of the fields of a class that can be declared."""
    for attribute in ("__pydantic_fields__", "__dataclass_fields__", "__struct_fields__"):
        if (found := getattr(of, attribute, None)) is not None:
            return set(found)
    return set()


def _form(of: type) -> DataclassOrModel | MsgspecStruct:
    if hasattr(of, "__struct_fields__"):
        return MsgspecStruct(of)
    if not (hasattr(of, "__dataclass_fields__") or hasattr(of, "__pydantic_fields__")):
        raise TypeError(NO_CLASS.format(of.__name__))
    if find_spec("pydantic") is None:
        raise ImportError(
            f"the dataclass {of.__name__} needs pydantic as an event: pip install pydantic", name="pydantic"
        )
    return DataclassOrModel(of)


def _check_type(event_type: object) -> None:
    """Raise ``InvalidEvent`` for a type that the database would refuse."""
    rule = f'type must be 1 to {MAX_CHARS} visible ASCII characters without space and "*"'
    if not isinstance(event_type, str):
        raise InvalidEvent(f'type must be a str, as in @event("order.created"), not {type(event_type).__name__}')
    if not 1 <= len(event_type) <= MAX_CHARS:
        raise InvalidEvent(f"{rule}; this one has {len(event_type)} characters")
    if wrong := WRONG.search(event_type):
        raise InvalidEvent(f"{rule}; {event_type[:60]!a} has {wrong[0]!a} at character {wrong.start() + 1}")
    if event_type.startswith(RESERVED):
        raise InvalidEvent(
            f'type {event_type[:60]} is reserved: types that begin with "{RESERVED}" are the relay\'s own'
        )


def _article(name: str) -> str:
    return f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"
