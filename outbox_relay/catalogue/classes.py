"""The kinds of classes that can be declared: how their instances are serialised, and their JSON Schema.

pydantic and msgspec are imported when a class of theirs is first used.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

from outbox_relay.emit_rows import InvalidEvent

KEPT_SETTINGS = ("ser_json_timedelta", "ser_json_temporal", "ser_json_bytes")
"""Settings of a class that a serializer has for values in fields without a type."""


class DataclassOrModel:
    """A dataclass or a pydantic model, serialised by pydantic's ``TypeAdapter``, with the aliases of its fields."""

    def __init__(self, of: type) -> None:
        self._of = of

    @cached_property
    def _adapter(self) -> Any:
        """The adapter, made at the first use, when every name in the annotations is defined."""
        from pydantic import TypeAdapter

        return TypeAdapter[Any](self._of)

    @cached_property
    def _serializer(self) -> Any:
        """A serializer that leaves numbers that are not finite, so that JSON refuses them. Pydantic's writes null.

        What a class writes for them by its own serializers or settings is left as it is.
        """
        from pydantic import BaseModel
        from pydantic_core import SchemaSerializer

        of: Any = self._of
        if type(self._adapter.core_schema) is not dict:  # it is made at the first use
            self._adapter.rebuild()
        schema: Any = self._adapter.core_schema  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
        is_model, has_own = issubclass(of, BaseModel), hasattr(of, "__pydantic_serializer__")
        own: dict[str, Any] = of.model_config if is_model else getattr(of, "__pydantic_config__", {}) if has_own else {}
        if own.get("ser_json_inf_nan") == "strings":
            return self._adapter.serializer
        settings: Any = {name: own[name] for name in KEPT_SETTINGS if name in own}
        settings["ser_json_inf_nan"] = "constants"
        return SchemaSerializer(schema, settings)

    def payload_of(self, instance: object) -> Any:
        """Return an instance as ``json.dumps`` takes it. Raises ``InvalidEvent``."""
        try:
            return self._dumped(instance)
        except Exception as error:
            raise InvalidEvent(_not_serialisable(self._of, self._place(instance), error)) from None

    def schema(self, reference: str) -> dict[str, Any]:
        """Return the JSON Schema of what is serialised."""
        template = reference.replace("{name}", "{model}")
        return self._adapter.json_schema(mode="serialization", ref_template=template)

    def _dumped(self, instance: object, **options: Any) -> Any:
        return self._serializer.to_python(instance, mode="json", by_alias=True, warnings="error", **options)

    def _place(self, instance: object) -> str:
        """Return path and type of the first field that is not serialised alone."""
        from outbox_relay.catalogue.declaration import field_names

        for name in sorted(field_names(self._of)):
            try:
                self._dumped(instance, include={name})
            except Exception:
                return f"{type(getattr(instance, name, None)).__name__} at $.{name}"
        return "$"


class MsgspecStruct:
    """A Struct of msgspec."""

    def __init__(self, of: type) -> None:
        self._of = of

    def payload_of(self, instance: object) -> Any:
        """Return an instance as ``json.dumps`` takes it. Raises ``InvalidEvent``.

        A Struct does not check its fields, so the result is read again as one.
        """
        import msgspec

        try:
            found = msgspec.to_builtins(instance, str_keys=True)
            msgspec.convert(found, self._of, str_keys=True)
        except Exception as error:
            raise InvalidEvent(_not_serialisable(self._of, self._place(instance), error)) from None
        return found

    def schema(self, reference: str) -> dict[str, Any]:
        """Return the JSON Schema of what is serialised."""
        import msgspec

        (found,), components = msgspec.json.schema_components([self._of], ref_template=reference)
        return {**found, "$defs": components} if components else found

    def _place(self, instance: object) -> str:
        """Return path and type of the first field that cannot be serialised or has another type than declared."""
        import msgspec

        for field in msgspec.structs.fields(self._of):
            value = getattr(instance, field.name, None)
            try:
                msgspec.convert(msgspec.to_builtins(value, str_keys=True), field.type, str_keys=True)
            except Exception:
                return f"{type(value).__name__} at $.{field.encode_name}"
        return "$"


def _not_serialisable(of: type, place: str, error: Exception) -> str:
    """Return the message, which has nothing of the payload."""
    said = f"{of.__name__} has {place}, which its class does not take"
    return f"payload is not serialisable: {said} ({type(error).__name__})"
