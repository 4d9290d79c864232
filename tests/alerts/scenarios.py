"""The faults whose series are recorded: one for each alert, and a run without a fault."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Final, NamedTuple

from outbox_relay.postgres.database import statements
from tests.alerts.system import Step, System
from tests.support.days import emit_ago, fill_days, register
from tests.support.receiver import Behaviour
from tests.support.receiver.answers import after, chosen, say
from tests.support.receiver.fault_modes import fails_twice
from tests.support.receiver.request import Request
from tests.support.roles import new_role

DROP_CONNECTIONS = """
select pg_terminate_backend(pid) from pg_stat_activity
 where datname = current_database() and pid <> pg_backend_pid()"""


def _nothing(_system: System) -> None:
    """Do nothing."""


def _nothing_again(_system: System, _scrape: int) -> None:
    """Do nothing."""


def _superuser(_system: System) -> AbstractContextManager[None]:
    return nullcontext()


class Scenario(NamedTuple):
    """A fault.

    ``prepare`` runs before the relays start. ``begin`` causes the fault at the fifth scrape, after a minute, and
    ``again`` runs at each later one. ``fires`` are the alerts that must fire in the end, and no others may.
    """

    fault: str
    fires: frozenset[str]
    begin: Step = _nothing
    prepare: Step = _nothing
    again: Callable[[System, int], None] = _nothing_again
    relays: int = 1
    own_server: bool = False
    hold_minutes: int = 0
    """Time for which the last values are repeated in the file, because nothing would change any more."""
    role: Callable[[System], AbstractContextManager[str | None]] = _superuser

    @property
    def has_beginning(self) -> bool:
        """True if the fault begins after a minute, and not before the relays start."""
        return self.prepare is _nothing or self.begin is not _nothing


def _hold(statement: str) -> Step:
    def begin(system: System) -> None:
        system.hold(statement)

    return begin


def _pause(system: System) -> None:
    system.command("pause", "crm")


def _reload_nonsense(system: System) -> None:
    system.reload("relay-1", "nonsense")


def _drop_connections(system: System, _scrape: int) -> None:
    system.execute(DROP_CONNECTIONS)


def _stop_server(system: System) -> None:
    system.server.stop()


def _stop_receiver(system: System) -> None:
    system.receiver.stop()


def _with_old_event(system: System) -> None:
    """Stop the receiver, and insert an event as if it had been emitted 70 minutes ago."""
    system.receiver.stop()
    system.execute(
        "insert into outbox.event (shard, type, key, payload, created_at) values"
        " (outbox_internal.shard_of('old', null), 'order.created', 'old', '1', now() - interval '70 minutes')"
    )


def _slow(seconds: float) -> Step:
    def begin(system: System) -> None:
        system.receiver.answer = after(seconds, say(200))

    return begin


def _one_at_a_time(system: System) -> None:
    system.in_flight = 1


def _kill(*names: str) -> Step:
    def begin(system: System) -> None:
        for name in names:
            system.kill(name)

    return begin


def _two_sinks(system: System) -> None:
    system.sinks = ("crm", "mail")


def _with_handler(system: System) -> None:
    system.has_handler = True


def _forget_sink(system: System) -> None:
    """Deploy a file without the second sink."""
    system.sinks = ("crm",)
    system.replace("relay-1")


def _refuse_some(system: System) -> None:
    def answer(request: Request) -> Behaviour:
        return say(400) if request.header("outbox-type") == "order.odd" else say(200)

    system.receiver.answer = chosen(answer)


def _emit_odd(system: System, scrape: int) -> None:
    if scrape % 8 == 0:
        system.execute("select outbox.emit('order.odd', '1', key => 'odd')")


def _twenty_days_ago(system: System) -> None:
    """Insert an event for whose day there is no partition."""
    with system.database.connect() as connection:
        emit_ago(connection, 20)


def _keep_old_day(system: System) -> None:
    """Pause a sink that has not read a day which is past ``keep_days``."""
    with system.database.connect(autocommit=True) as connection:
        fill_days(connection, 40, 40)
        register(connection, "crm", "beginning")
    system.command("pause", "crm")


def _register_unknown_zone(system: System) -> None:
    """Register a schedule whose time zone no machine knows, as a relay with other time zones would."""
    schedule = {"name": "nightly", "cron": "0 3 * * *", "timezone": "Mars/Olympus", "type": "order.due"}
    wanted = json.dumps([{**schedule, "payload": {}, "missed": "one"}])
    with system.database.connect(autocommit=True) as connection:
        connection.execute(statements()["register_schedules"], {"wanted": wanted})


def _hourly_faults(system: System, scrape: int) -> None:
    """Deploy both relays in turn, emit a burst, and let a fifth of the requests fail twice."""
    match scrape:
        case 8 | 10:
            system.replace(f"relay-{scrape // 2 - 3}")
        case 20:
            system.execute("select outbox.emit('order.burst', '1', key => n::text) from generate_series(1, 2000) n")
        case 32:
            system.server.restart()
        case _:
            pass


def _failing_sometimes(system: System) -> None:
    failed: dict[str, int] = {}

    def answer(request: Request) -> Behaviour:
        failed[request.uid] = failed.get(request.uid, 0) + 1
        return say(500) if fails_twice(request.uid) and failed[request.uid] <= 2 else say(200)

    system.receiver.answer = chosen(answer)


def _unprivileged(system: System) -> AbstractContextManager[str]:
    return new_role(system.database, "alerts")


def _as_role(system: System) -> None:
    from outbox_relay.postgres.migrations import migrate

    assert system.user is not None
    migrate(system.database.dsn, grant_relay=[system.user])


SCENARIOS: Final[Mapping[str, Scenario]] = {
    "healthy": Scenario(
        "two relays are deployed in turn, a fifth of the requests fails twice before it succeeds, a burst of 2,000 "
        "events is emitted, and the database server is restarted",
        frozenset(),
        _failing_sometimes,
        again=_hourly_faults,
        relays=2,
        own_server=True,
    ),
    "relay-absent": Scenario(
        "both relays are killed",
        frozenset({"OutboxRelayAbsent"}),
        _kill("relay-1", "relay-2"),
        relays=2,
    ),
    "relay-down": Scenario("one of two relays is killed", frozenset({"OutboxRelayDown"}), _kill("relay-1"), relays=2),
    "shards-unowned": Scenario(
        "a file without one of two sinks is deployed",
        frozenset({"OutboxShardsUnowned", "OutboxSinkBehind"}),
        _forget_sink,
        _two_sinks,
    ),
    "sink-behind": Scenario(
        "the receiver takes 3 s for each request, one request is sent at a time, and an event comes every second",
        frozenset({"OutboxSinkBehind", "OutboxEndToEndSlow"}),
        _slow(3.0),
        _one_at_a_time,
    ),
    "sink-far-behind": Scenario(
        "the receiver is down, and one of the events was emitted 70 minutes ago",
        frozenset({"OutboxSinkFarBehind", "OutboxSinkBehind", "OutboxCircuitOpen"}),
        _with_old_event,
    ),
    "sink-stalled": Scenario(
        "another session locks outbox.progress against writes in a transaction that stays open, so that no position is "
        "settled, and the same events are delivered again and again",
        frozenset(
            {
                *("OutboxSinkStalled", "OutboxSinkBehind", "OutboxLockWaits", "OutboxLongTransaction"),
                *("OutboxSessionsRestarting", "OutboxEndToEndSlow"),
            }
        ),
        _hold("lock table outbox.progress in share mode"),
    ),
    "sink-paused": Scenario(
        "the sink is paused",
        frozenset({"OutboxSinkPaused"}),
        _pause,
    ),
    "end-to-end-slow": Scenario(
        "the receiver takes 1.2 s for each request, one request is sent at a time, and an event comes every second",
        frozenset({"OutboxEndToEndSlow"}),
        _slow(1.2),
        _one_at_a_time,
    ),
    "circuit-open": Scenario(
        "the receiver is down", frozenset({"OutboxCircuitOpen", "OutboxSinkBehind"}), _stop_receiver
    ),
    "dead-letters": Scenario(
        "the receiver refuses an event every two minutes",
        frozenset({"OutboxDeadLettersRising"}),
        _refuse_some,
        again=_emit_odd,
    ),
    "calls-hanging": Scenario(
        "the first call of a Python handler never returns",
        frozenset({"OutboxCallsHanging", "OutboxSinkBehind"}),
        prepare=_with_handler,
    ),
    "sessions-restarting": Scenario(
        "the connections of the relay are terminated every 15 s",
        frozenset({"OutboxSessionsRestarting"}),
        again=_drop_connections,
    ),
    "config-reload-failed": Scenario(
        "a file that is not TOML is loaded by SIGHUP",
        frozenset({"OutboxConfigReloadFailed"}),
        _reload_nonsense,
    ),
    "long-transaction": Scenario(
        "a transaction is open from before the start of the relay",
        frozenset({"OutboxLongTransaction"}),
        prepare=_hold("select pg_current_xact_id()"),
        own_server=True,
    ),
    "lock-waits": Scenario(
        "a session locks outbox.event against writes in a transaction that stays open, and the application waits",
        frozenset({"OutboxLockWaits", "OutboxLongTransaction"}),
        _hold("lock table outbox.event in share mode"),
    ),
    "default-partition": Scenario(
        "an event is inserted for whose day there is no partition",
        frozenset({"OutboxDefaultPartitionNotEmpty"}),
        _twenty_days_ago,
    ),
    "retention-blocked": Scenario(
        "a day is past keep_days, and a paused sink has not read it",
        frozenset({"OutboxRetentionBlocked", "OutboxSinkPaused"}),
        prepare=_keep_old_day,
        hold_minutes=120,
    ),
    "schedule-late": Scenario(
        "a schedule is registered whose time zone the relay's machine does not know",
        frozenset({"OutboxScheduleLate"}),
        _register_unknown_zone,
    ),
    "figures-unknown": Scenario(
        "the relay's role may not see the sessions of others",
        frozenset({"OutboxFiguresUnknown"}),
        prepare=_as_role,
        role=_unprivileged,
    ),
    "figures-old": Scenario(
        "the database server is stopped",
        frozenset({"OutboxFiguresOld"}),
        _stop_server,
        own_server=True,
    ),
}
