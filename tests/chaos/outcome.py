"""The outcome of a run, and its violations of what is promised."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from tests.chaos.expected import Reconciled
from tests.chaos.forms import Form
from tests.chaos.lanes import Record
from tests.chaos.oracle import Account
from tests.chaos.recovery import BOUND_SECONDS, Flow, recoveries

NOT_JOINED_SHARE = 0.2
"""Largest share of the relays that join without getting shards in time."""


@dataclass
class Outcome:
    """The figures of a run."""

    form: Form
    seed: int
    record: Record
    seconds: dict[str, float] = field(default_factory=dict[str, float])
    """Phase → duration in seconds."""
    load: dict[str, str] = field(default_factory=dict[str, str])
    """Phase → load of the machine at its end."""
    reconciled: Reconciled = field(default_factory=Reconciled)
    accounts: dict[str, Account] = field(default_factory=dict[str, Account])
    flows: dict[str, Flow] = field(default_factory=dict[str, Flow])
    last_emit: float = 0.0
    replays: list[str] = field(default_factory=list[str])
    """A line for each replay that did not deliver what it should."""
    replayed: int = 0
    """Number of events that arrived by replays."""
    refused: int = 0
    """Number of requests with an invalid signature."""
    queue: list[str] = field(default_factory=list[str])
    """A line for each violation of unique keys and of schedules."""
    unique: int = 0
    """Number of events with a unique key."""
    merged: int = 0
    """Number of calls that returned an earlier event of their unique key."""
    ticks: int = 0
    """Number of events of schedules."""


def violations(outcome: Outcome) -> Iterator[str]:
    """Yield a line for each broken promise and for each required count that was not reached."""
    yield from _of_sinks(outcome)
    yield from outcome.replays
    yield from outcome.queue
    for what, count in (("unique key", outcome.unique), ("merged event", outcome.merged), ("schedule", outcome.ticks)):
        if count < outcome.form.least_jobs:
            yield f"only {count} of {outcome.form.least_jobs} times: {what}"
    if outcome.form.least.get("replay") and not outcome.replayed:
        yield "no event arrived by a replay"
    yield from _of_expected(outcome.reconciled)
    yield from _of_recovery(outcome)
    yield from _of_counts(outcome)


def _of_sinks(outcome: Outcome) -> Iterator[str]:
    for account in outcome.accounts.values():
        if not account.sound:
            yield (
                f"{account.sink}: {account.lost} lost, {account.stuck} stuck, {account.phantom} phantom,"
                f" {account.untimely} untimely, {account.reordered} reordered, {account.condemned} dead for no reason,"
                f" {len(account.unexplained)} duplicates that no fault explains:"
                f" {account.examples}"
            )
    if outcome.refused and not outcome.record.count("clock shifted"):
        yield f"{outcome.refused} requests were refused for their signature, and every relay's clock was right"


def _of_expected(found: Reconciled) -> Iterator[str]:
    if not found.sound:
        yield (
            f"the database's log is not what the writers say: {len(found.vanished)} vanished {found.vanished[:5]},"
            f" {len(found.risen)} rolled back and there {found.risen[:5]},"
            f" {len(found.strangers)} of nobody {found.strangers[:5]}"
        )


def _of_recovery(outcome: Outcome) -> Iterator[str]:
    for recovery in recoveries(outcome.record.alone, outcome.flows["kafka"], outcome.last_emit):
        if recovery.promised is not None and recovery.most > BOUND_SECONDS:
            yield f"{recovery.fault}: events flowed again only after {recovery.most:.1f} s"


def _of_counts(outcome: Outcome) -> Iterator[str]:
    for words, least in outcome.form.least.items():
        if outcome.record.count(words) < least:
            yield f"only {outcome.record.count(words)} of {least} {words} were injected"
    joined = outcome.record.count("join and leave") + outcome.record.count("clock shifted")
    if (without := outcome.record.count("not joined")) > NOT_JOINED_SHARE * (joined + without):
        yield f"{without} relays that joined had no shards within their time, and {joined} had some"
    if outcome.reconciled.committed < outcome.form.least_events:
        yield f"only {outcome.reconciled.committed} of {outcome.form.least_events} events were committed"
