"""The relay process: start, run until a signal, stop. One event loop, one task group."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import resource
import signal
from collections.abc import Awaitable, Callable

from structlog.stdlib import BoundLogger

from outbox_relay import __version__
from outbox_relay.domain.errors import ConfigurationError
from outbox_relay.domain.file_reading import FILES
from outbox_relay.service.build import build
from outbox_relay.service.check import check_schema
from outbox_relay.service.health import Health
from outbox_relay.service.logs import flush, logger
from outbox_relay.service.metrics.exposition import Exposition
from outbox_relay.service.metrics.history import History
from outbox_relay.service.metrics.snapshot import Snapshots
from outbox_relay.service.readiness import Readiness
from outbox_relay.service.reload import Reload
from outbox_relay.service.reload_loop import ReloadLoop
from outbox_relay.service.supervisor import SURVIVED, Supervisor
from outbox_relay.service.tracing import start as start_tracing
from outbox_relay.service.tracing import untraced
from outbox_relay.settings import Settings

STEP_SECONDS = 2.0
"""Time limit of each last step of a stop, beyond ``stop_after_seconds``."""


def run(settings: Settings, read_settings: Callable[[], Settings]) -> int:
    """Relay in the foreground until SIGTERM or SIGINT, and return the exit code.

    ``read_settings`` is called at SIGHUP and returns the settings of a reload.

    Raises ``ConfigurationError`` or ``DatabaseUnusable`` if the relay cannot start and waiting would not help.
    """
    _raise_file_limit()
    service = Service(settings, read_settings)
    gc.freeze()  # exempts the objects made so far: they live as long as the process
    return asyncio.run(service.serve())


def _raise_file_limit() -> None:
    """Raise the limit of open files to the hard limit, so that no part uses up the descriptors of the others.

    The limit stays as it is if the system forbids the change, as a system call filter may.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _cannot_listen(host: str, port: int, error: OSError | UnicodeError) -> str:
    """Return the message for an address at which the process cannot listen."""
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    number = error.errno if isinstance(error, OSError) else None
    # The resolver's numbers are below zero, and some errors have none.
    said = os.strerror(number) if number and number > 0 else "the host is not an address of this machine"
    fix = "stop the process that uses the port, or set another listen in [http]"
    return f"http.listen: cannot listen at {address}: {said}: {fix}"


class Service:
    """One relay process."""

    def __init__(self, settings: Settings, read_settings: Callable[[], Settings]) -> None:
        self._address = settings.http.address
        self._stop_after_seconds = settings.relay.stop_after_seconds
        self._log: BoundLogger = logger().bind(relay=settings.relay.name)
        self._stopping = asyncio.Event()
        self._tracing = tracing = start_tracing(os.environ, settings.relay.name, self._log)
        trace = tracing.traced if tracing else untraced
        parts = FILES.call(lambda: build(settings, self._log, self._stopping, trace))
        self._store, self._sinks, self._relays = parts.store, parts.sinks, parts.relays
        self._own_addresses = parts.own_addresses
        self._replays = parts.replays
        served = parts.sinks, parts.webhooks, parts.own_addresses, parts.relays
        watching = parts.recorded_config, parts.lag_watch, parts.schedules
        replaying = parts.replays, parts.replay_clients
        self._reload = reload = Reload(settings, read_settings, *served, *watching, *replaying)
        self._reload_loop = ReloadLoop(
            reload.read, reload.apply, self._log, reload.describe, parts.recorded_config.note_reload
        )
        self._background = {**parts.background, "reload": self._reload_loop.run}
        self._readiness = Readiness(self._relays, lambda: self._reload_loop.last_successful, self._stopping)
        figures = parts.figures
        snapshots = Snapshots(self._relays, parts.measures, figures.known, lambda: self._reload_loop.last_successful)
        self._exposition = Exposition(snapshots.take)
        history = History(self._store, parts.measures, snapshots.end_interval, figures.known, self._log)
        self._background |= {"figures": figures.run, "history": history.run}
        self._supervisor = Supervisor(self._store.replace_lost_connections, self._stopping, self._log)

    async def serve(self) -> int:
        """Start, run until a signal, stop, and return the exit code.

        Raises as ``run``.
        """
        self._handle_signals()
        health = await self._listen()
        try:
            if await self._start():
                await self._run()
        finally:
            await self._close()
            if self._tracing:
                await self._tracing.stop()
            if health:
                await health.stop()
            self._exposition.close()
        self._log.info("relay.stopped")
        return self._supervisor.exit_code

    def _handle_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._request_stop, signal.Signals(number).name)
        loop.add_signal_handler(signal.SIGHUP, self._reload_loop.request)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})  # blocked by the command line since its start

    def _request_stop(self, name: str) -> None:
        """Stop at the first signal, and end the process at the second."""
        if self._stopping.is_set():
            self._log.warning("relay.stopping_at_once", signal=name)
            flush()
            os._exit(1)
        self._log.info("relay.stopping", signal=name)
        self._stopping.set()

    async def _listen(self) -> Health | None:
        """Start the HTTP listener and return it, or None if the settings have none."""
        if self._address is None:
            return None
        health = Health(self._address, self._readiness.report, self._exposition.answer, self._log)
        try:
            host, port = await health.start()
        except (OSError, UnicodeError) as error:
            raise ConfigurationError(_cannot_listen(*self._address, error)) from None
        self._own_addresses.add(host, port)
        self._log.info("relay.listening", host=host, port=port)
        return health

    # -- start ------------------------------------------------------------------------------------------------

    async def _start(self) -> bool:
        """Wait for the database, register and open the sinks. Return False if a signal came before the end of that."""
        starting = asyncio.ensure_future(self._open())
        stopping = asyncio.ensure_future(self._stopping.wait())
        await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if not starting.done():
            starting.cancel()
            await asyncio.wait({starting})
            return False
        starting.result()
        return True

    async def _open(self) -> None:
        await self._supervisor.retry("database.unreachable", self._register)
        for sink in self._sinks.values():
            await sink.open()

    async def _register(self) -> None:
        await self._store.open()
        await check_schema(self._store)
        await self._own_addresses.refresh()
        await self._relays.register()
        self._log.info("relay.started", version=__version__, sinks=sorted(self._relays))

    # -- run and stop -----------------------------------------------------------------------------------------

    async def _run(self) -> None:
        """Run all parts until the process is to stop, then stop them."""
        async with asyncio.TaskGroup() as group:

            def supervise(
                name: str, part: Callable[[], Awaitable[None]], sink: str | None = None
            ) -> asyncio.Task[None]:
                return group.create_task(self._supervisor.supervise(name, part, sink=sink))

            background = [supervise(name, part) for name, part in self._background.items()]
            background.append(group.create_task(self._replays.run(self._supervisor.supervise)))
            relays = [supervise(f"sink {name}", relay.run, name) for name, relay in self._relays.items()]
            await self._stopping.wait()
            await self._stop(relays)
            for task in (*relays, *background):
                task.cancel()

    async def _stop(self, relays: list[asyncio.Task[None]]) -> None:
        """Let the relays settle or park the events in flight and release their shards, then leave the database."""
        try:
            async with asyncio.timeout(self._stop_after_seconds):
                await self._last_step("this relay's row", self._relays.stop)
                await self._replays.stop()
                if relays:
                    await asyncio.wait(relays)
        except (TimeoutError, *SURVIVED) as error:
            self._log.warning("relay.stop_incomplete", reason=str(error) or "out of time")
            for task in relays:
                task.cancel()
            if relays:
                await asyncio.wait(relays, timeout=STEP_SECONDS)
        await self._leave()

    async def _leave(self) -> None:
        """Release the remaining shards and rows, and remove this process from the relays of the database.

        A relay resets its sink first, so nothing is sent later and its shards may have other owners. ``rebase`` refuses
        while a relay is registered.
        """
        await asyncio.gather(*(self._last_step(f"sink {name}", each.leave) for name, each in self._relays.items()))
        await self._last_step("replays", self._replays.leave)
        await self._last_step("this relay's row", self._relays.unregister)

    async def _last_step(self, what: str, step: Callable[[], Awaitable[None]]) -> None:
        try:
            async with asyncio.timeout(STEP_SECONDS):
                await step()
        except (TimeoutError, *SURVIVED) as error:
            self._log.warning("relay.left_behind", what=what, reason=str(error) or "out of time")

    async def _close(self) -> None:
        await self._reload.close()
        await self._replays.close()
        served = (sink for relay in self._relays.values() for sink in relay.sinks)
        for sink in {id(sink): sink for sink in (*self._sinks.values(), *served)}.values():
            await sink.close()
        await self._store.close()
