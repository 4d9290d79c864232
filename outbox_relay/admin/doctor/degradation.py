"""The checks of the history: does the database become slower than it was? Pure.

The recent minutes are compared with the two days before, because no fixed limit fits both a laptop and a cluster. Each
figure is a median of minutes, so a checkpoint, a backup or a short lock is no finding. A change is found once it has
lasted for eight of the 15 recent minutes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from outbox_relay.admin.doctor.finding import Finding
from outbox_relay.admin.doctor.sinks import listed
from outbox_relay.admin.text import duration

RECENT_SECONDS = 900.0
"""Length of the recent time."""
RECENT_MINUTES = 5
"""Least number of recent minutes to judge by."""
EARLIER_MINUTES = 60
"""Least number of earlier minutes to compare with."""
TIMES = 3.0
"""Growth that is reported. Percentiles come from buckets whose bounds are up to 3 times apart: less may be none."""
LEAST_SECONDS = 0.05
"""Time from which a percentile is reported: half the time within which a position is written."""
LEAST_BUSY_MS = 6_000.0
"""Time of statements in a minute from which their growth is reported: a tenth of one connection."""
FLAT = 1.5
"""Growth of the deliveries up to which their rate counts as flat."""
SILENT_SECONDS = 600.0
"""Time without a minute from which the history counts as missing, if a relay has run for as long."""

FIGURES_SECONDS = 60.0
"""Maximum age of stored figures that are examined: twice the age at which relays drop them."""


def examine_history(found: Sequence[Any]) -> Iterator[Finding]:
    """Yield the findings on statements that take longer than they did, and on work that grows without deliveries."""
    judged = [each for each in found if _is_comparable(each)]
    slower = [
        each for each in judged if each.measure in ("claim", "settle", "tick") and _has_grown(each, LEAST_SECONDS)
    ]
    if slower:
        slower.sort(key=lambda each: each.recent, reverse=True)
        yield Finding(
            "statements-slower", "warning", "statements of the relays take several times as long as before",
            f"{listed([_slower_text(each) for each in slower])}; these are 99th percentiles of the median minute of "
            f"the last {RECENT_SECONDS / 60:.0f}, and of the two days before",
            "see the findings on transactions, dead rows and locks; without any, look at the server's CPU and disks",
        )  # fmt: skip
    totals = {each.measure: each for each in judged if each.measure in ("busy", "rate")}
    if len(totals) == 2:
        yield from _examine_work(totals["busy"], totals["rate"])


def examine_minutes(newest: float | None, uptime: float | None) -> Iterator[Finding]:
    """Yield a finding if live relays write no history; ``uptime`` is None if none is alive.

    ``newest`` is the age of the newest minute, or None if there is none.
    """
    if (uptime or 0.0) > SILENT_SECONDS and (newest is None or newest > SILENT_SECONDS):
        last = "never" if newest is None else f"{duration(newest)} ago"
        yield Finding(
            "history-missing", "ok", "not examined: whether the database becomes slower",
            f"a relay has been running for {duration(uptime or 0.0)}; history was last written: {last}",
            "read the relays' logs for housekeeping.failed with the chore history",
        )  # fmt: skip


def examine_figures(failed: Sequence[Any]) -> Iterator[Finding]:
    """Yield a finding if relays cannot measure figures of the database, which are then missing in their metrics."""
    names = [each.name for each in failed]
    if names:
        denied = names == ["transactions"]
        yield Finding(
            "figures-unknown", "ok", "not examined by the relays: metrics of the database are missing",
            f"groups: {listed(names)}",
            "grant pg_read_all_stats to the role of the relays" if denied
            else "read the relays' logs for figures.failed; transactions need pg_read_all_stats for the relays' role",
        )  # fmt: skip


def _examine_work(busy: Any, rate: Any) -> Iterator[Finding]:
    """Yield a finding if the statements' time has grown, and the deliveries have not."""
    if _has_grown(busy, LEAST_BUSY_MS) and rate.recent <= FLAT * rate.earlier:
        yield Finding(
            "database-busy", "warning", "the database works more for the relays, and no more events are delivered",
            f"statements take {busy.recent / 1000:.1f} s in each minute, before {busy.earlier / 1000:.1f} s; events "
            f"delivered in each minute: {rate.recent:.0f}, before {rate.earlier:.0f}",
            "see the findings on transactions and dead rows: statements that walk over dead rows work for nothing",
        )  # fmt: skip


def _is_comparable(each: Any) -> bool:
    enough = each.recent_minutes >= RECENT_MINUTES and each.earlier_minutes >= EARLIER_MINUTES
    return enough and each.recent is not None and each.earlier is not None


def _has_grown(each: Any, least: float) -> bool:
    return each.recent >= least and each.recent >= TIMES * each.earlier


def _slower_text(each: Any) -> str:
    of = f" of sink {each.sink}" if each.sink else ""
    return f"{each.measure}{of}: {_milliseconds(each.recent)} (before: {_milliseconds(each.earlier)})"


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms" if seconds < 1.0 else duration(seconds)
