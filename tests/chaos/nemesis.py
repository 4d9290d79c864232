"""What injects one kind of fault, and what it says about each that it injected."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Strike:
    """One fault that was injected."""

    fault: str
    """Its kind: "sigkill", "zombie", "backend killed", "promotion", …"""

    began: float
    """When it was injected, by time.monotonic()."""

    healed: float
    """When the injector had undone it (the process runs again, the server accepts connections again, …)."""

    detail: str = ""


class Nemesis(Protocol):
    """Injects one kind of fault, again and again."""

    @property
    def fault(self) -> str:
        """The kind of its strikes."""
        ...

    def strike(self, rng: random.Random) -> Strike:
        """Inject the fault once; return when the injector has undone it, without waiting for the relays to recover."""
        ...
