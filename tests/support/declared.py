"""The events of an application, declared as classes of each kind."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime
from decimal import Decimal
from uuid import UUID

import msgspec
from pydantic import BaseModel, ConfigDict, Field

from outbox_relay.catalogue import event


class Line(BaseModel):
    """A part of an order."""

    sku: str
    number: int = 1


@event("order.created", key="id")
class OrderCreated(BaseModel):
    """A pydantic model."""

    id: int
    total: Decimal
    lines: list[Line] = []
    counts: dict[str, int] = {}


@event("order.paid", key="order_key")
@dataclass
class OrderPaid:
    """A dataclass, whose key is a property."""

    id: int
    amount: float
    at: datetime = field(default_factory=lambda: datetime.now(UTC))
    parts: tuple[int, str] = (1, "a")

    @property
    def order_key(self) -> str:
        """The key of its order."""
        return f"order-{self.id}"


@event("order/packed~{x}%")
class OrderPacked(msgspec.Struct):
    """A struct of msgspec, without a key, and with a type that references must escape."""

    id: UUID
    weight: int
    next: OrderPacked | None = None


@event("order.named")
class OrderNamed(BaseModel):
    """A model whose field has another name in JSON."""

    model_config = ConfigDict(populate_by_name=True, extra="forbid")
    order_name: str = Field(serialization_alias="orderName")


@dataclass
class Undeclared:
    """A class without a declaration."""

    id: int


class OrderReopened(OrderCreated):
    """A subclass without a declaration of its own."""
