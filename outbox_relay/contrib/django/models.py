"""Events and deliveries of schema outbox as models of Django, which are read and never written.

Payloads and headers are no fields, because few roles may read them.
"""

from __future__ import annotations

from datetime import datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, TypeAlias
from uuid import UUID

from django.db import NotSupportedError, models
from django.db.models import signals
from django.db.models.expressions import Col
from django.db.models.lookups import Exact, In

if TYPE_CHECKING:
    TextField: TypeAlias = models.TextField[str, str]
else:
    TextField = models.TextField

READ_ONLY = "only emit and the relays write rows of schema outbox: leave them out with --exclude outbox_relay"
APART = "@"
"""The character between id and sink in the place of a delivery."""


class PlaceColumn(Col):
    """The id and the sink of a delivery as one text, such as ``4711@crm``."""

    def as_sql(self, compiler: Any, connection: Any) -> tuple[str, tuple[Any, ...]]:
        """Return the expression."""
        table = compiler.quote_name_unless_alias(self.alias)
        return f"({table}.id || '{APART}' || {table}.sink)", ()


class PlaceField(TextField):
    """The primary key of a delivery in Django: its id and its sink, which are the one in the database."""

    def get_col(self, alias: Any, output_field: Any = None) -> Any:
        """Return the expression that reads a place."""
        return PlaceColumn(alias, self, output_field)

    @cached_property
    def cached_col(self) -> Any:
        """The expression that reads a place of the table."""
        return PlaceColumn(self.model._meta.db_table, self)


@PlaceField.register_lookup
class PlaceIn(In):
    """Places in a list, which the primary key of the table finds."""

    def as_sql(self, compiler: Any, connection: Any) -> tuple[str, tuple[Any, ...]]:
        """Return the condition. A place that cannot be one of a delivery matches none."""
        return _condition(compiler, self.lhs, self.rhs)


@PlaceField.register_lookup
class PlaceExact(Exact):
    """One place, which the primary key of the table finds."""

    def as_sql(self, compiler: Any, connection: Any) -> tuple[str, tuple[Any, ...]]:
        """Return the condition."""
        return _condition(compiler, self.lhs, [self.rhs])


def _condition(compiler: Any, column: Any, places: Any) -> tuple[str, tuple[Any, ...]]:
    table = compiler.quote_name_unless_alias(column.alias)
    pairs = [pair for place in places if (pair := _pair(str(place))) is not None]
    ids, sinks = [number for number, _ in pairs], [sink for _, sink in pairs]
    return f"({table}.id, {table}.sink) in (select * from unnest(%s::bigint[], %s::text[]))", (ids, sinks)  # noqa: S608 - a quoted name


def _pair(place: str) -> tuple[int, str] | None:
    number, apart, sink = place.partition(APART)
    is_id = number.isascii() and number.isdigit() and len(number) < 19
    return (int(number), sink) if apart and is_id and "\0" not in sink else None


def _refuse(*_: Any, **__: Any) -> NoReturn:
    """Refuse to write. Raises ``NotSupportedError``."""
    raise NotSupportedError(READ_ONLY)


class Rows(models.QuerySet[Any]):
    """Rows that nothing of Django writes or deletes."""

    delete = update = bulk_create = bulk_update = _refuse


class LoggedEvent(models.Model):
    """A row of the log ``outbox.event``."""

    objects = Rows.as_manager()

    id: models.BigIntegerField[int, int] = models.BigIntegerField(primary_key=True)
    uid: models.UUIDField[UUID, UUID] = models.UUIDField()
    type: models.TextField[str, str] = models.TextField()
    key: models.TextField[str | None, str | None] = models.TextField(null=True)
    shard: models.SmallIntegerField[int, int] = models.SmallIntegerField()
    content_type: models.TextField[str | None, str | None] = models.TextField(null=True)
    deliver_at: models.DateTimeField[datetime | None, datetime | None] = models.DateTimeField(null=True)
    created_at: models.DateTimeField[datetime, datetime] = models.DateTimeField()

    class Meta:
        managed = False
        db_table = '"outbox"."event"'
        default_permissions = ("view",)
        permissions: ClassVar = [("view_payload", "Can view payloads and headers")]
        verbose_name = "event"
        ordering: ClassVar = ["-id"]

    def __str__(self) -> str:
        """Return the uid."""
        return str(self.uid)


class EventDelivery(models.Model):
    """A row of ``outbox.delivery``: an event that a sink treats on its own."""

    objects = Rows.as_manager()

    place = PlaceField(primary_key=True)
    event_id: models.BigIntegerField[int, int] = models.BigIntegerField(db_column="id")
    sink: models.TextField[str, str] = models.TextField()
    uid: models.UUIDField[UUID, UUID] = models.UUIDField()
    type: models.TextField[str, str] = models.TextField()
    key: models.TextField[str | None, str | None] = models.TextField(null=True)
    state: models.TextField[str, str] = models.TextField()
    attempts: models.IntegerField[int, int] = models.IntegerField()
    last_error: models.TextField[str | None, str | None] = models.TextField(null=True)
    last_status: models.IntegerField[int | None, int | None] = models.IntegerField(null=True)
    last_attempt_at: models.DateTimeField[datetime | None, datetime | None] = models.DateTimeField(null=True)
    created_at: models.DateTimeField[datetime, datetime] = models.DateTimeField()

    class Meta:
        managed = False
        db_table = '"outbox"."delivery"'
        default_permissions = ("view",)
        permissions: ClassVar = [
            ("retry_eventdelivery", "Can retry deliveries"),
            ("discard_eventdelivery", "Can discard deliveries"),
        ]
        verbose_name = "delivery"
        verbose_name_plural = "deliveries"
        unique_together: ClassVar = [("event_id", "sink")]
        ordering: ClassVar = ["-event_id", "-sink"]

    def __str__(self) -> str:
        """Return the event and the sink."""
        return f"{self.uid} to {self.sink}"


for _model in (LoggedEvent, EventDelivery):  # that of loaddata, too, which calls no method of the model
    signals.pre_save.connect(_refuse, sender=_model)
    signals.pre_delete.connect(_refuse, sender=_model)
