"""The service: everything composed, started, supervised and stopped. One event loop, one TaskGroup."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import resource
import signal
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import NamedTuple
from uuid import uuid4

from structlog.stdlib import BoundLogger
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, wait_random_exponential

from outbox_relay import __version__
from outbox_relay.domain.circuit import CircuitPolicy
from outbox_relay.domain.errors import (
    ConfigurationError,
    DatabaseUnavailable,
    DatabaseUnusable,
    RelayError,
    SessionReset,
    StatementFailed,
)
from outbox_relay.domain.rate_limited_log import RateLimitedLog
from outbox_relay.domain.routing import like_pattern
from outbox_relay.domain.sink_spec import SinkSpec
from outbox_relay.postgres import schema_versions
from outbox_relay.postgres.listener import WRONG_DATABASE, CommitListener, dsn_identity
from outbox_relay.postgres.shard_statements import missing_positions
from outbox_relay.postgres.store import Store
from outbox_relay.relay.housekeeping import Housekeeping
from outbox_relay.relay.leases import Ownership
from outbox_relay.relay.session import SinkRelay
from outbox_relay.relay.ticker import Ticking
from outbox_relay.service.health import AcceptErrors, Health
from outbox_relay.service.logs import logger
from outbox_relay.service.reloading import Reloading, reason
from outbox_relay.service.webhooks import Renewal, Webhooks
from outbox_relay.settings import KafkaSettings, Settings, WebhookSettings, restart_needed
from outbox_relay.sinks import Sink
from outbox_relay.sinks.kafka import ClientSettings, KafkaSink, RecordFormat, TopicCreation

RECOVER_MOST_SECONDS = 2.0
"""Longest pause before a part that lost the database tries again."""
LEAVE_SECONDS = 2.0
"""Time limit of each step of leaving, beyond ``stop_after_seconds``."""
MOST_STARVED = 5
"""Consecutive out-of-memory failures of a part after which the process gives up."""
HEALTHY_SECONDS = 10.0
"""A part that ran this long begins with short pauses again."""
READY_SECONDS = 10.0
"""Without word from the database for this long a relay is not ready."""
STALL_LEAST_SECONDS = 3.0
"""Shortest silence of a broker that is taken for a stall; else a third of the lease."""
GARBAGE_OBJECTS = 50_000
"""New objects after which the garbage collector looks for cycles among them."""
REMOVED = "was removed from the database; restart the relay to begin it again, or take it out of the file"
"""Reason shown for a served sink that is no longer in the database."""
SURVIVED = (DatabaseUnavailable, StatementFailed, SessionReset, DatabaseUnusable)
"""What a running service survives: the part starts again."""
PASSING = (DatabaseUnavailable, StatementFailed, SessionReset)
"""Errors after which a starting service tries again."""


def run(settings: Settings, reload: Callable[[], Settings]) -> int:
    """Relay in the foreground until SIGTERM or SIGINT; returns the exit code.

    ``reload`` reads the settings again, at SIGHUP. Raises ``ConfigurationError`` or ``DatabaseUnusable`` when the relay
    cannot start and waiting would not mend it.
    """
    _take_file_descriptors()
    service = Service(settings, reload)
    _collect_seldom()
    return asyncio.run(service.serve())


def _collect_seldom() -> None:
    """Let the garbage collector look at what lives for ever no more, and at the rest less often.

    Some thousand events are in hand while they flow. To go through them after every 700 new objects, as is the
    default, was a third of the time that it takes to make their tuples.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(GARBAGE_OBJECTS)


def _take_file_descriptors() -> None:
    """Raise the limit of open files to what the system allows: connections of one part leave enough for the others.

    Where that is forbidden, as a filter of system calls may do, the limit stays as it is.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


async def check_online(settings: Settings) -> tuple[list[str], list[str]]:
    """What is wrong with the database and the destinations, a line each; nothing when all answer.

    And what is to be warned of: that the database lets in events which a destination would refuse.
    """
    problems: list[str] = []
    warnings: list[str] = []
    store = _store(settings, 2)
    payload_bytes = None
    try:
        await store.open()
        await _check_schema(store)
        payload_bytes = await store.max_payload_bytes()
        problems += await _check_listening(settings, store)
        problems += [missing_positions(*found) for found in (await store.missing_positions()).items()]
        warnings += [f"database: {row.said}" for row in await store.named("foreign_privileges", {})]
    except (DatabaseUnavailable, StatementFailed, DatabaseUnusable, ConfigurationError) as error:
        problems.append(f"database: {error}")
    finally:
        await store.close()
    webhooks = Webhooks(settings)
    await webhooks.own.refresh()
    for name in settings.sinks:
        problem, warning = await _check_sink(name, settings, webhooks, payload_bytes)
        problems += problem
        warnings += warning
    return problems, warnings


async def _check_listening(settings: Settings, store: Store) -> list[str]:
    """Return a problem when ``database.listen_dsn`` does not lead to the database whose log is read."""
    dsn = _wakeup_dsn(settings)
    if dsn is None or not settings.database.listen_dsn:
        return []
    try:
        right = await dsn_identity(dsn()) == await store.database_identity()
    except (DatabaseUnavailable, StatementFailed, DatabaseUnusable) as error:
        return [f"database.listen_dsn: {error}"]
    return [] if right else [WRONG_DATABASE]


async def _check_sink(
    name: str, settings: Settings, webhooks: Webhooks, payload_bytes: int | None
) -> tuple[list[str], list[str]]:
    """A problem or a warning, or neither."""
    try:
        sink = _sink(name, settings, webhooks)
    except ConfigurationError as error:
        return [str(error)], []
    refuses = None
    try:
        await sink.open()
        reason = await sink.check()
        if reason is None and payload_bytes is not None and isinstance(sink, KafkaSink):
            refuses = await sink.payload_size_warning(payload_bytes)
    finally:
        await sink.close()
    problem, warning = ([f"sinks.{name}: {said}"] if said else [] for said in (reason, refuses))
    return problem, warning


class _Newer(NamedTuple):
    """A configuration that was read at SIGHUP: everything of it that can be checked without the database is."""

    settings: Settings
    specs: dict[str, SinkSpec]
    webhooks: Renewal
    producers: list[tuple[KafkaSink, ClientSettings]]


class Service:
    """One relay process."""

    def __init__(self, settings: Settings, reload: Callable[[], Settings]) -> None:
        self._settings = settings
        self._read = reload
        self._log: BoundLogger = logger().bind(relay=settings.relay.name)
        self._seldom = RateLimitedLog(self._log)
        self._stopping = asyncio.Event()
        self._reloading = Reloading(self._newer, self._adopt, self._log)
        self._webhooks = Webhooks(settings)
        self._sinks = [(_spec(name, settings), _sink(name, settings, self._webhooks)) for name in settings.sinks]
        self._store = _store(settings, min(30, 4 + 3 * len(self._sinks)))
        lease = settings.relay.lease_seconds
        wakeup = CommitListener(_wakeup_dsn(settings), self._store.database_identity, self._log)
        self._ticking = Ticking(self._store, wakeup, lease, self._log)
        self._ownership = Ownership(self._store, uuid4(), settings.relay.name, __version__, lease, self._log)
        self._relays: list[SinkRelay] = []
        self._code = 0

    async def serve(self) -> int:
        """Start, work, stop; returns the exit code."""
        self._settings.database.require_dsn()
        self._obey_signals()
        health = await self._listen()
        try:
            if await self._start():
                await self._work()
        finally:
            await self._close()
            if health:
                await health.stop()
        self._log.info("stopped")
        return self._code

    def _obey_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._asked_to_stop, number)
        loop.add_signal_handler(signal.SIGHUP, self._reloading.ask)
        loop.set_exception_handler(AcceptErrors(self._log))

    def _asked_to_stop(self, number: int) -> None:
        if self._stopping.is_set():
            self._log.warning("stopping at once", signal=signal.Signals(number).name)
            os._exit(1)
        self._log.info("stopping", signal=signal.Signals(number).name)
        self._stopping.set()

    async def _listen(self) -> Health | None:
        address = self._settings.http.address
        if address is None:
            return None
        health = Health(address, self._ready)
        try:
            host, port = await health.start()
        except OSError as error:
            raise ConfigurationError(
                f"http.listen: cannot listen at {address[0]}:{address[1]}: {error.strerror}"
            ) from None
        self._webhooks.own.add(host, port)
        self._log.info("listening", host=host, port=port)
        return health

    def _ready(self) -> tuple[bool, Mapping[str, object]]:
        silent = time.monotonic() - self._ownership.heard_at
        faults = {relay.spec.name: fault for relay in self._relays if (fault := _fault(relay))}
        ready = bool(self._relays) and silent < READY_SECONDS and not self._stopping.is_set() and not faults
        sinks = {
            relay.spec.name: {
                "shards": len(relay.holding.held),
                "in_hand": relay.in_hand,
                "in_flight_limit": relay.in_flight_limit,
                "circuit": relay.circuit,
                "fault": faults.get(relay.spec.name),
                "restarts": dict(relay.restarts),
            }
            for relay in self._relays
        }
        return ready, {
            "database_heard_seconds_ago": round(silent, 1) if self._relays else None,
            "config_last_reload_successful": self._reloading.last_successful,
            "sinks": sinks,
        }

    # -- start ------------------------------------------------------------------------------------------------

    async def _start(self) -> bool:
        """Wait for the database, register the sinks; returns False when told to stop before that."""
        starting = asyncio.ensure_future(self._begin())
        stopping = asyncio.ensure_future(self._stopping.wait())
        await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if not starting.done():
            starting.cancel()
            await asyncio.wait({starting})
            return False
        starting.result()
        return True

    async def _begin(self) -> None:
        async for attempt in self._retrying("the database cannot be reached yet", *PASSING):
            with attempt:
                await self._store.open()
                await _check_schema(self._store)
                await self._webhooks.own.refresh()
                await self._register()
        for _, sink in self._sinks:
            await sink.open()

    async def _register(self) -> None:
        specs = [spec for spec, _ in self._sinks]
        generations = await self._generations(specs)
        self._relays = [
            SinkRelay(
                spec,
                sink,
                self._store,
                self._ticking,
                self._ownership,
                self._ownership.add(spec.name, generations[spec.name]),
                self._log.bind(sink=spec.name),
                self._stopping,
            )
            for spec, sink in self._sinks
        ]
        self._log.info("started", version=__version__, sinks=sorted(generations))

    async def _generations(self, specs: list[SinkSpec]) -> dict[str, int]:
        look = await self._ticking.refresh()
        wanted = [(s.name, s.patterns, s.start) for s in specs]
        return await self._store.register_sinks(wanted, look.tick, server=look.incarnation)

    # -- work -------------------------------------------------------------------------------------------------

    async def _work(self) -> None:
        async with asyncio.TaskGroup() as parts:
            keeping = [
                parts.create_task(self._keep(name, part))
                for name, part in (
                    ("ownership", self._ownership.run),
                    ("ticking", self._ticking.run),
                    ("housekeeping", Housekeeping(self._store, self._log).run),
                    ("own addresses", self._webhooks.own.run),
                    ("reload", self._reloading.run),
                )
            ]
            relays = [parts.create_task(self._keep(f"sink {r.spec.name}", r.run)) for r in self._relays]
            await self._stopping.wait()
            await self._drain(relays)
            for task in (*relays, *keeping):
                task.cancel()

    async def _drain(self, relays: list[asyncio.Task[None]]) -> None:
        """Let the sinks finish or park what is in hand, settle and release, within the limit; then say good-bye."""
        try:
            async with asyncio.timeout(self._settings.relay.stop_after_seconds):
                await self._ownership.stop()
                if relays:
                    await asyncio.wait(relays)
        except (TimeoutError, *SURVIVED) as error:
            self._log.warning("stopped before everything in hand was settled", reason=str(error) or "out of time")
            for task in relays:
                task.cancel()
            if relays:
                await asyncio.wait(relays, timeout=LEAVE_SECONDS)
        await self._leave()

    async def _leave(self) -> None:
        """Release what is left and tell the other relays that this one is gone: ``rebase`` asks who runs.

        Nothing of a sink is sent any more once it has been reset, so its shards may have other owners.
        """
        await asyncio.gather(*(self._goodbye(f"sink {relay.spec.name}", relay.leave) for relay in self._relays))
        await self._goodbye("this relay's row", self._ownership.leave)

    async def _goodbye(self, what: str, step: Callable[[], Awaitable[None]]) -> None:
        try:
            async with asyncio.timeout(LEAVE_SECONDS):
                await step()
        except (TimeoutError, *SURVIVED) as error:
            self._log.warning("left behind until its lease ends", what=what, reason=str(error) or "out of time")

    async def _keep(self, name: str, part: Callable[[], Awaitable[None]]) -> None:
        """Run ``part`` until it ends by itself, again and again after what a service survives."""
        starved = 0
        async for attempt in self._retrying(f"{name} starts again", *SURVIVED, MemoryError):
            with attempt:
                began = time.monotonic()
                try:
                    await part()
                except (*SURVIVED, MemoryError) as error:
                    if self._stopping.is_set():
                        return
                    if time.monotonic() - began > HEALTHY_SECONDS:
                        attempt.retry_state.attempt_number, starved = 1, 0
                    starved = starved + 1 if isinstance(error, MemoryError) else 0
                    if starved >= MOST_STARVED:
                        self._give_up(f"{name} ran out of memory {starved} times in a row")
                        return
                    raise

    def _give_up(self, why: str) -> None:
        """End the process as SIGTERM does, but with code 1, so that another one takes its place."""
        self._log.error("giving up", reason=why)
        self._code = 1
        self._stopping.set()

    def _retrying(self, what: str, *survived: type[Exception]) -> AsyncRetrying:
        async def tell(state: RetryCallState) -> None:
            error = state.outcome.exception() if state.outcome else None
            cause = error.reason if isinstance(error, RelayError) else None
            said = reason(error) if error else ""
            self._seldom.warning(what, reason=said, cause=cause, again_in_seconds=round(state.upcoming_sleep, 2))
            if isinstance(error, DatabaseUnavailable):
                await self._store.replace_lost_connections()

        return AsyncRetrying(
            retry=retry_if_exception_type(survived),
            wait=wait_random_exponential(multiplier=0.1, max=RECOVER_MOST_SECONDS),
            before_sleep=tell,
        )

    # -- reload -----------------------------------------------------------------------------------------------

    async def _newer(self) -> _Newer:
        """Read the settings again.

        Raises ConfigurationError for what is wrong, and names what a reload cannot change.
        """
        settings = await asyncio.to_thread(self._read)
        if refused := restart_needed(self._settings, settings):
            raise ConfigurationError("; ".join(refused))
        specs = {name: _spec(name, settings) for name in settings.sinks}
        webhooks = await asyncio.to_thread(self._webhooks.read, settings)
        return _Newer(settings, specs, webhooks, await asyncio.to_thread(self._tried, settings))

    async def _adopt(self, newer: _Newer) -> str | None:
        """Apply ``newer``: first in the database, since until it is known there nothing may be read by it.

        What follows reads no file and cannot fail. Otherwise this relay would give the sinks up to a configuration
        that it does not have.
        """
        known = {row.name for row in await self._store.sinks(newer.specs)}
        if removed := sorted(newer.specs.keys() - known):
            return "; ".join(f"sinks.{name}: {REMOVED}" for name in removed)
        generations = await self._generations(list(newer.specs.values()))
        self._webhooks.renew(newer.webhooks)
        for relay in self._relays:
            relay.reload(newer.specs[relay.spec.name], generations[relay.spec.name])
        for sink, producer in newer.producers:
            sink.use_settings(producer)
        self._settings = newer.settings
        return None

    def _tried(self, settings: Settings) -> list[tuple[KafkaSink, ClientSettings]]:
        """Return the producers' settings and files of the Kafka sinks. Raises ConfigurationError."""
        return [
            (sink, sink.validated_settings(kafka.producer, kafka.producer_files))
            for spec, sink in self._sinks
            if isinstance(sink, KafkaSink) and isinstance(kafka := settings.sinks[spec.name], KafkaSettings)
        ]

    async def _close(self) -> None:
        for _, sink in self._sinks:
            await sink.close()
        await self._store.close()


def _fault(relay: SinkRelay) -> str | None:
    """Return why this process cannot serve the sink, or None."""
    if relay.holding.removed:
        return "the sink was removed from the database"
    return relay.holding.fault or relay.refusal


async def _check_schema(store: Store) -> None:
    """Raises ``DatabaseUnusable`` when the schema does not fit this relay, or what it holds does not fit the server."""
    problem = schema_versions.fit(*await store.schema())
    if problem:
        raise DatabaseUnusable(problem)
    await store.floor()


def _store(settings: Settings, connections: int) -> Store:
    database = settings.database
    return Store(database.dsn, pooler=database.pooler == "transaction", connections=connections)


def _wakeup_dsn(settings: Settings) -> Callable[[], str] | None:
    if settings.database.wakeup_dsn() is None:
        return None
    return lambda: settings.database.wakeup_dsn() or ""


def _spec(name: str, settings: Settings) -> SinkSpec:
    sink = settings.sinks[name]
    patterns = settings.routes.patterns_for(name)
    return SinkSpec(
        name=name,
        patterns=patterns,
        types=None if patterns == ("*",) else tuple(like_pattern(pattern) for pattern in patterns),
        ordered=sink.order == "key",
        hold=sink.when_dead == "hold",
        start=sink.start,
        park_after_seconds=settings.relay.park_after_seconds,
        parked_max=sink.parked_max,
        retry=sink.retry_policy(),
        circuit=CircuitPolicy(**sink.circuit.model_dump()),
    )


def _sink(name: str, settings: Settings, webhooks: Webhooks) -> Sink:
    match settings.sinks[name]:
        case KafkaSettings() as kafka:
            return _kafka(name, kafka, max(STALL_LEAST_SECONDS, settings.relay.lease_seconds / 3))
        case WebhookSettings():
            return webhooks.make(name)


def _kafka(name: str, kafka: KafkaSettings, stall_seconds: float) -> KafkaSink:
    mode = None if kafka.cloudevents == "none" else kafka.cloudevents
    creation = None
    if kafka.create_topics and kafka.partitions and kafka.replication_factor:
        creation = TopicCreation(kafka.partitions, kafka.replication_factor)
    return KafkaSink(
        name,
        kafka.topic_template(),
        kafka.producer,
        stall_seconds,
        record_format=RecordFormat(
            kafka.partition_header or None,
            kafka.tombstones,
            mode,
            kafka.cloudevents_source,
            kafka.type_header or None,
        ),
        creation=creation,
        files=kafka.producer_files,
        hold_keys=kafka.when_dead == "hold" and kafka.order == "key",
        topics=kafka.topics,
        topics_max=kafka.topics_max,
    )
