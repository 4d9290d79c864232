"""Parts that the encoders of all formats share."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, NoReturn, TypeAlias

from confluent_kafka.schema_registry import RegisteredSchema, SchemaRegistryClient
from confluent_kafka.serialization import MessageField, SerializationContext

from outbox_relay.sinks.kafka.json_depth import MAX_DEPTH, is_too_deep

References: TypeAlias = dict[tuple[str, int], RegisteredSchema]
Serialize: TypeAlias = Callable[[Any, SerializationContext], bytes | None]

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,63}")
"""A name that may be shown. Keys of maps come from the payload, and others of them are hidden."""
_NOT_JSON = "the payload is not JSON in UTF-8"
MAX_SECONDS = 3.0
"""Longest time of the processor for one event. One that takes longer would hold up its sink at each attempt."""
MAX_SHOWN = 5
"""Maximum number of names, or of faults, in a reason."""


class FoundSchema(NamedTuple):
    """A registered schema, and by subject and version those that it refers to, directly or not."""

    root: RegisteredSchema
    references: References

    def in_order(self) -> list[RegisteredSchema]:
        """Return the schemas that the root refers to, each after those that it refers to itself."""
        ordered: dict[tuple[str, int], RegisteredSchema] = {}

        def visit(schema: RegisteredSchema) -> None:
            for reference in schema.schema.references or ():
                place = (str(reference.subject), int(reference.version or 0))
                if place not in ordered:
                    visit(self.references[place])
                    ordered[place] = self.references[place]

        visit(self.root)
        return list(ordered.values())


class Misfit(ValueError):
    """The payload does not fit the schema. The message says where, without any value."""


class EncoderPlan(NamedTuple):
    """The schema of an encoder, its subject for reasons, and the registry and settings of confluent's serializer."""

    found: FoundSchema
    place: str
    registry: SchemaRegistryClient
    settings: dict[str, object]


class SchemaEncoder:
    """Encodes payloads of one schema. A subclass has the format."""

    content_type = ""
    finite = True
    """Numbers that Python rounds to infinity are refused."""

    def __init__(self, plan: EncoderPlan) -> None:
        self._place = plan.place

    def encode(self, topic: str, payload: bytes) -> bytes:
        """Return the value for ``payload``. Raise ValueError, without any value of it, if it does not fit."""
        begin = time.thread_time()
        try:
            value = _loaded(payload, _finite if self.finite else float)
            encoded = self._encoded(value, payload, SerializationContext(topic, MessageField.VALUE))
        except Misfit as reason:
            raise ValueError(f"does not fit the schema of {self._place}: {reason}") from None
        except Exception as error:
            # Messages of libraries quote values.
            text = f"does not fit the schema of {self._place} ({type(error).__name__})"
            raise ValueError(text) from None
        if time.thread_time() - begin > MAX_SECONDS:
            raise ValueError(f"takes longer than {MAX_SECONDS:g} s to encode in the schema of {self._place}")
        if encoded is None:
            raise ValueError(f"does not fit the schema of {self._place}: it has no value for null")
        return encoded

    def _encoded(self, value: Any, payload: bytes, context: SerializationContext) -> bytes | None:
        raise NotImplementedError


def _loaded(payload: bytes, to_float: Callable[[str], float]) -> Any:
    try:
        text = payload.decode()
    except UnicodeDecodeError:
        raise Misfit(_NOT_JSON) from None
    if is_too_deep(text):
        raise Misfit(f"the payload has more than {MAX_DEPTH} arrays and objects in each other")
    try:
        return json.loads(text, parse_constant=_refuse_constant, parse_float=to_float)
    except Misfit:
        raise
    except (ValueError, RecursionError):
        raise Misfit(_NOT_JSON) from None


def _finite(text: str) -> float:
    if math.isinf(number := float(text)):
        raise Misfit("the payload has a number beyond those of 64 bits")
    return number


def _refuse_constant(_name: str) -> NoReturn:
    raise ValueError


def path_of(parts: Iterable[str | int]) -> str:
    """Return a path of names and positions, such as ``items[2].price``."""
    found = ""
    for part in parts:
        if isinstance(part, int):
            found += f"[{part}]"
        else:
            found += ("." if found else "") + (part if _NAME.fullmatch(part) else "…")
    return found


def listed(names: Iterable[str]) -> str:
    """Return the first few names."""
    shown = [name if _NAME.fullmatch(name) else "…" for name in names]
    return ", ".join(shown[:MAX_SHOWN]) + (", …" if len(shown) > MAX_SHOWN else "")
