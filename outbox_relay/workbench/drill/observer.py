"""The view of an operator during a drill: metrics every few seconds, and changes in `status` and `doctor`."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from outbox_relay import admin
from outbox_relay.admin.doctor import Finding, doctor
from outbox_relay.domain.errors import RelayError
from outbox_relay.workbench.drill.metrics import SHOWN, Scrape, add_up, series_text
from outbox_relay.workbench.processes import RelayProcess

SCRAPE_SECONDS = 1.0
LINE_SECONDS = 3.0
"""Interval of the lines with metrics."""
ASK_SECONDS = 4.0
"""Interval of `status` and `doctor`, and the time limit of both."""
DELIVERED = "outbox_delivered_total"
INTERRUPTIONS: Sequence[str] = ("outbox_session_restarts_total", "outbox_lease_lost_total")
PER_SINK: Sequence[str] = ("waiting", "held", "dead", "circuit", "paused", "unowned", "last_error")
"""Values of a sink in `status` whose change shows its line."""


class Observer:
    """Looks at `relays` and at the database `dsn` whenever it is polled, and says what it sees."""

    def __init__(self, relays: Callable[[], Sequence[RelayProcess]], dsn: str, say: Callable[[str], None]) -> None:
        self._relays = relays
        self._dsn = dsn
        self._say = say
        self.scrape = Scrape(0, 0, {})
        """The newest scrape."""
        self.interruptions: list[tuple[float, float]] = []
        """Times, in seconds since 1970, between which a session was restarted or a lease was lost."""
        self._wall = time.time()
        self._scraped_at = self._line_at = self._asked_at = 0.0
        self._before: tuple[float, Scrape] | None = None
        self._findings: dict[tuple[str, str], Finding] | None = None
        self._sinks: dict[str, tuple[object, ...]] = {}
        self._owners: dict[str, object] = {}
        self._unanswered = ""

    def poll(self) -> None:
        """Scrape, ask and say what is due."""
        now = time.monotonic()
        if now >= self._scraped_at + SCRAPE_SECONDS:
            self._scraped_at = now
            self._scrape()
        if now >= self._line_at + LINE_SECONDS:
            self._line_at = now
            self._say(f"metrics  {self._metrics_text(now)}")
        if now >= self._asked_at + ASK_SECONDS:
            self._ask()
            self._asked_at = time.monotonic()

    def _scrape(self) -> None:
        """Scrape all relays; say and record that a session was restarted or a lease was lost."""
        before, since, self._wall = self.scrape, self._wall, time.time()
        self.scrape = add_up([relay.metrics() for relay in self._relays()])
        for name in INTERRUPTIONS:
            for label, value in self.scrape.values(name).items():
                if value > before.values(name).get(label, 0.0):
                    self._say(f"metrics  {series_text(name, label, value)}")
                    self.interruptions.append((since, self._wall))

    def _metrics_text(self, now: float) -> str:
        """Return the rates of deliveries, every value that is not normal, and further ones."""
        before, self._before = self._before, (now, self.scrape)
        parts: list[str] = []
        for sink, count in sorted(self.scrape.values(DELIVERED).items()):
            if before is not None and before[1].up == self.scrape.up:
                rate = (count - before[1].values(DELIVERED).get(sink, 0.0)) / (now - before[0])
                parts.append(f"rate({DELIVERED}({sink})) {max(rate, 0.0):,.0f}/s")
        parts += self.scrape.abnormal()
        for name in SHOWN:
            parts += [series_text(name, label, v) for label, v in self.scrape.values(name).items() if v >= 1]
        return ", ".join(parts)

    # -- status and doctor --------------------------------------------------------------------------------------

    def _ask(self) -> None:
        """Say what changed in `status` and `doctor`, or once that they do not answer."""
        try:
            with admin.connect(lambda: self._dsn, pooler=False, check_schema=False) as store:
                store.limit_calls(ASK_SECONDS)
                found, findings = admin.status(store), doctor(store)
        except RelayError as error:
            text = str(error).partition("\n")[0]
            if not self._unanswered:
                self._say(f"status   cannot be read: {text}")
            self._unanswered = text
            return
        self._unanswered = ""
        self._show_status(found)
        self._show_findings({(each.id, each.summary): each for each in findings})

    def _show_status(self, found: dict[str, Any]) -> None:
        lines = admin.status_text(found).splitlines()
        sinks = {name: tuple(sink[part] for part in PER_SINK) for name, sink in found["sinks"].items()}
        owners: dict[str, object] = {relay["name"]: relay["shards"] for relay in found["relays"] or ()}
        changed = [name for name in sinks if sinks[name] != self._sinks.get(name)]
        moved = [name for name in owners if owners[name] != self._owners.get(name)]
        self._sinks, self._owners = sinks, owners
        heading = lines[:1] if changed else []
        named = [*changed, *moved, *(f"last error of {name}" for name in changed)]
        for line in (*heading, *(line for line in lines if line.startswith(tuple(named)))):
            self._say(f"status   {line}")

    def _show_findings(self, findings: Mapping[tuple[str, str], Finding]) -> None:
        before = self._findings
        for key, finding in findings.items():
            if before is None or key not in before:
                self._say(f"doctor   {finding.severity.upper()}  {finding.summary}: {finding.evidence}")
        for key in before or {}:
            if key not in findings:
                self._say(f"doctor   no longer: {key[1]}")
        if before is None and not findings:
            self._say("doctor   no problems found")
        self._findings = dict(findings)
