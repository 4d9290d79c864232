"""The interface of a fault injector, and the record of an injected fault."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Strike:
    """One fault that was injected."""

    fault: str
    """Kind of the fault: "sigkill", "zombie", "backend killed", "promotion", …"""

    began: float
    """Time of the injection by time.monotonic()."""

    healed: float
    """Time at which the injector had undone it: the process runs, the server accepts connections, …"""

    detail: str = ""


class Nemesis(Protocol):
    """Injects one kind of fault repeatedly."""

    @property
    def fault(self) -> str:
        """Return the kind of its strikes."""
        ...

    def strike(self, rng: random.Random) -> Strike:
        """Inject the fault once and undo it. Do not wait until the relays have recovered."""
        ...
