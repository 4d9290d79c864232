"""The relay process: start, run until a signal, stop.

The main thread only waits: everything that may block has another one. There is one for each sink and replay, one for
the listener, and those of ``Parts.background``. All are daemons, so that none keeps the process from ending.
"""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import signal
import time
from collections.abc import Callable, Sequence
from threading import Thread
from types import FrameType

from structlog.stdlib import BoundLogger

from outbox_relay import __version__
from outbox_relay.domain.errors import ConfigurationError
from outbox_relay.service import tracing
from outbox_relay.service.build import Parts
from outbox_relay.service.check import check_schema
from outbox_relay.service.http import Listener, Readiness
from outbox_relay.service.logs import flush, logger, reason
from outbox_relay.settings import Settings

TURN_SECONDS = 0.1
"""Maximum time from a signal to its effect."""
STEP_SECONDS = 1.0
"""Time limit of each of the two last steps of a stop, beyond ``stop_after_seconds``."""

END_SECONDS = 0.5
"""Time for the parts in the background to end."""


def run(settings: Settings, read_settings: Callable[[], Settings]) -> int:
    """Relay in the foreground until SIGTERM or SIGINT, and return the exit code.

    ``read_settings`` is called at SIGHUP and returns the settings of a reload.

    Raises ``ConfigurationError`` or ``DatabaseUnusable`` if the relay cannot start and waiting would not help.
    """
    _raise_file_limit()
    service = Service(settings, read_settings)
    gc.freeze()  # exempts the objects made so far: they live as long as the process
    service.serve()
    return 0


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
        self._trace = tracing.start(settings.relay.name, self._log)
        self._parts = parts = Parts(settings, read_settings, self._log, self._trace)
        self._supervisor = parts.supervisor
        self._stopping = parts.supervisor.stopping
        self._readiness = Readiness(parts.sinks, parts.keeper, lambda: parts.reload.last_successful, self._stopping)
        self._stop_signal: str | None = None
        self._background: dict[str, Thread] = {}

    def serve(self) -> None:
        """Start, run until a signal, and stop. Raises as ``run``, and an error that ended a part."""
        self._handle_signals()
        listener = self._listen()
        try:
            if self._start():
                self._run()
        finally:
            self._close(listener)
        if self._supervisor.failure is not None:
            raise self._supervisor.failure
        self._log.info("relay.stopped")

    # -- signals ------------------------------------------------------------------------------------------------

    def _handle_signals(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._request_stop)
        signal.signal(signal.SIGHUP, self._request_reload)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})  # blocked by the command line since its start

    def _request_stop(self, number: int, _frame: FrameType | None) -> None:
        """Stop at the first signal, and end the process at the second."""
        name = signal.Signals(number).name
        if self._stop_signal is not None:
            self._log.warning("relay.stopping_at_once", signal=name)
            flush()
            os._exit(1)
        self._stop_signal = name

    def _request_reload(self, _number: int, _frame: FrameType | None) -> None:
        self._parts.reload.requested = True

    def _wait(self) -> None:
        """Wait for one turn. After a signal, ask all parts to stop."""
        self._readiness.turned_at = time.monotonic()
        self._stopping.wait(TURN_SECONDS)
        if self._stop_signal is not None and not self._stopping.is_set():
            self._log.info("relay.stopping", signal=self._stop_signal)
            self._stopping.set()

    # -- start --------------------------------------------------------------------------------------------------

    def _listen(self) -> Listener | None:
        """Start the HTTP listener and return it, or None if the settings have none."""
        if self._address is None:
            return None
        try:
            listener = Listener(self._address, self._readiness, self._parts.measures.registry, self._log)
        except (OSError, UnicodeError) as error:
            raise ConfigurationError(_cannot_listen(*self._address, error)) from None
        host, port, *_ = listener.server_address
        self._supervisor.start("listener", listener.serve_forever)
        self._parts.own_addresses.add(str(host), port)
        self._log.info("relay.listening", host=str(host), port=port)
        return listener

    def _start(self) -> bool:
        """Wait for the database, and register and open the sinks. Return False if a signal came before that ended."""

        def start() -> None:
            self._supervisor.retry("database.unreachable", self._register)
            if not self._stopping.is_set():
                for client in self._parts.clients.values():
                    client.open()

        thread, errors = _begun("start", start)
        while thread.is_alive() and not self._stopping.is_set():
            self._readiness.turned_at = time.monotonic()
            thread.join(TURN_SECONDS)
            if self._stop_signal is not None:
                self._wait()
        if errors:
            raise errors[0]
        return not self._stopping.is_set()

    def _register(self) -> None:
        parts = self._parts
        parts.store.open()
        check_schema(parts.store)
        parts.own_addresses.refresh()
        parts.sinks.register(parts.specs, parts.clients)
        self._log.info("relay.started", version=__version__, sinks=sorted(parts.sinks))

    # -- run and stop -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        """Run all parts until the process is to stop, then stop them."""
        self._background = {name: self._supervisor.start(name, part) for name, part in self._parts.background.items()}
        self._parts.sinks.start()
        while not self._stopping.is_set():
            self._wait()
        self._stop()

    def _stop(self) -> None:
        """Let the loops settle what is in flight and release their shards, then leave the database.

        What is not done in time is given up: nothing more is sent then, and shards and rows are released if the
        database answers. ``rebase`` refuses while a relay is registered.
        """
        parts, until = self._parts, time.monotonic() + self._stop_after_seconds
        self._background["reload"].join(STEP_SECONDS)  # no sink is added any more
        sinks = [*parts.sinks.values(), *parts.sinks.leaving]
        for sink in sinks:
            sink.stop()
        parts.keeper.stop()
        threads = [sink.thread for sink in sinks if sink.thread] + [self._background["replays"]]
        if _alive(threads, until):
            self._log.warning("relay.stop_incomplete", reason="out of time")
            parts.store.give_up_at = until = time.monotonic() + STEP_SECONDS
            for sink in (*sinks, *parts.replays.sinks.values()):
                sink.loop.abandon()
            for thread in _alive(threads, until):
                self._log.warning("relay.left_behind", what=thread.name, reason="out of time")
        parts.store.give_up_at = until = time.monotonic() + STEP_SECONDS
        thread, errors = _begun("leave", parts.keeper.leave)
        if _alive([thread], until) or errors:
            failed = reason(errors[0]) if errors else "out of time"
            self._log.warning("relay.left_behind", what="this relay's row", reason=failed)

    def _close(self, listener: Listener | None) -> None:
        """Release what is left. Sinks that were served have closed their clients."""
        parts = self._parts
        parts.end_background()
        _alive([*self._background.values()], time.monotonic() + END_SECONDS)
        tracing.stop(self._trace)
        if listener:
            listener.close()
        parts.store.close()


def _begun(name: str, step: Callable[[], None]) -> tuple[Thread, list[BaseException]]:
    """Run a step in a thread that is not waited for, and return it with a list that gets the error of the step."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            step()
        except BaseException as error:
            errors.append(error)

    thread = Thread(target=run, name=name, daemon=True)
    thread.start()
    return thread, errors


def _alive(threads: Sequence[Thread], until: float) -> list[Thread]:
    """Wait for threads, and return those that have not ended in time."""
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
    return [thread for thread in threads if thread.is_alive()]
