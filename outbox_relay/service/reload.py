"""A reload at SIGHUP: read the settings again, and apply what can change without a restart.

There is one policy. The routes and new sinks are registered in the database. A sink whose settings, or the contents of
whose files, have changed drains, and is then served with a new client; one that is in the file no more drains and
leaves. Everything else continues. Wrong settings change nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from structlog.stdlib import BoundLogger

from outbox_relay.domain.errors import ConfigurationError
from outbox_relay.domain.files import is_stream, read_file
from outbox_relay.domain.log_events import RateLimitedLog
from outbox_relay.relay.sink_spec import SinkSpec
from outbox_relay.service.clients import Clients, build_specs
from outbox_relay.service.logs import reason
from outbox_relay.service.recorded_config import RecordedConfig
from outbox_relay.service.sinks import ServedSinks
from outbox_relay.service.webhooks import system_contents
from outbox_relay.settings import Settings, differing, merged
from outbox_relay.settings.effective import named_files
from outbox_relay.settings.problems import dotted
from outbox_relay.sinks import Sink

TURN_SECONDS = 0.1
"""Maximum time from a request to its begin."""
PAUSE_SECONDS = 1.0
"""Pause before a configuration is applied again."""
LIMIT_SECONDS = 10.0
"""Time limit of each statement."""
FILE_BYTES = 1 << 20
"""Maximum number of bytes of a file that are compared."""
REMOVED = "was removed from the database: /readyz says what to do"
"""Reason for applying no setting of a sink that is missing from the database."""


class NewConfiguration(NamedTuple):
    """A configuration that was read, and passed every check that does not need the database."""

    settings: Settings
    """The settings after the reload: those that need a restart are as before."""
    applied: list[str]
    needs_restart: list[str]
    specs: Mapping[str, SinkSpec]
    clients: Clients
    sinks: Mapping[str, Sink]
    """The clients, which are open, of the sinks that change or are new."""
    contents: Mapping[str, int]


class Reload:
    """Carries out requests for a reload, one after another. ``step`` is a chore. A new request replaces a pending one.

    ``read_settings`` returns the settings of file and environment; it may block. ``use`` is called with the settings
    and the clients of a reload that was carried out; it must not fail.
    """

    def __init__(
        self,
        settings: Settings,
        read_settings: Callable[[], Settings],
        clients: Clients,
        sinks: ServedSinks,
        use: Callable[[Settings, Clients], None],
        recorded_config: RecordedConfig,
        log: BoundLogger,
    ) -> None:
        self._settings = settings
        self._read_settings = read_settings
        self._clients = clients
        self._sinks = sinks
        self._use = use
        self._recorded_config = recorded_config
        self._log = log
        self._seldom = RateLimitedLog(log)
        self._contents = _contents(settings)
        self._pending: NewConfiguration | None = None
        self._newest_refused = False
        self.requested = False
        """True while a reload is to begin as soon as possible. Set by a signal's handler, which must take no lock."""
        self.last_successful = True
        """True if the newest request was carried out, or none was made; False while it is pending."""

    def step(self) -> float:
        """Carry out a request, or try a pending one again. Return the seconds until the next step. Never raises."""
        if self.requested:
            self.requested = False
            self._read_new()
        if self._pending is not None:
            self._try(self._pending)
        return TURN_SECONDS if self._pending is None else PAUSE_SECONDS

    def _read_new(self) -> None:
        """Replace the pending configuration. A refused request leaves it, since the database may have it already."""
        try:
            new = self._read()
        except Exception as error:  # no error in a file may end the relay
            self._newest_refused = True
            self._refuse(reason(error))
        else:
            self._drop_pending()
            self._pending, self._newest_refused = new, False

    def _read(self) -> NewConfiguration:
        """Read the settings and every file that they name, and make the clients that change. Apply none of it.

        Raises ``ConfigurationError`` for a wrong setting, or for a client that cannot deliver.
        """
        old, wanted = self._settings, self._read_settings()
        settings = merged(old, wanted)
        contents, specs, before = _contents(settings), build_specs(settings), build_specs(old)
        files = [setting for setting, found in contents.items() if found != self._contents.get(setting, found)]
        applied = list(dict.fromkeys([*(dotted(path) for path in differing(old, settings)), *files]))
        changed = [name for name, spec in specs.items() if spec != before.get(name) or _of([name], applied)]
        clients, sinks = self._clients.with_settings(settings), dict[str, Sink]()
        try:
            for name in changed:
                sinks[name] = _opened(name, clients)
        except BaseException:
            _close(sinks.values())
            raise
        needs_restart = [dotted(path) for path in differing(settings, wanted)]
        return NewConfiguration(settings, applied, needs_restart, specs, clients, sinks, contents)

    def _drop_pending(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            _close(pending.sinks.values())

    def _try(self, new: NewConfiguration) -> None:
        """Apply ``new``; it stays pending if that raises, since the database may have it."""
        try:
            missing = self._sinks.reload(new.specs, new.sinks)
        except Exception as error:
            self.last_successful = False
            self._seldom.warning("config.reload_pending", reason=reason(error))
            return
        self._pending = None
        _close(sink for name, sink in new.sinks.items() if name in missing)
        removed = [f"{dotted(('sinks', name))}: {REMOVED}" for name in missing]
        if missing and len(missing) == len(new.specs):
            self._refuse("; ".join(removed))
            return
        served = {name: sink for name, sink in new.settings.sinks.items() if name not in missing}
        kept = {name: sink for name, sink in self._settings.sinks.items() if name in missing}
        self._settings = new.settings.model_copy(update={"sinks": {**served, **kept}})
        self._contents, self._clients = new.contents, new.clients
        self._use(self._settings, new.clients)
        self.last_successful = not self._newest_refused
        if self.last_successful:
            self._recorded_config.note_reload(None)
        self._log.info(
            "config.reloaded",
            applied=[setting for setting in new.applied if not _of(missing, [setting])],
            needs_restart=new.needs_restart,
            **({"not_applied": removed} if removed else {}),
        )
        if new.needs_restart:
            self._log.warning("config.restart_needed", reason=", ".join(new.needs_restart))

    def _refuse(self, why: str) -> None:
        self.last_successful = False
        self._recorded_config.note_reload(why)
        self._log.error("config.reload_refused", reason=why)


def _opened(name: str, clients: Clients) -> Sink:
    """Return an open client. Raises ``ConfigurationError`` if it cannot deliver."""
    sink = clients.make(name)
    sink.open()
    if sink.fault is not None:
        sink.close()
        raise ConfigurationError(f"{dotted(('sinks', name))}: {sink.fault}")
    return sink


def _contents(settings: Settings) -> dict[str, int]:
    """Return a hash of the contents of each file that a sink uses, by setting. Blocks."""
    found = system_contents(settings)
    for setting, file in named_files(settings).items():
        if setting.startswith("sinks."):
            try:
                if not is_stream(file):  # its contents can be read once
                    found[setting] = hash(read_file(file, FILE_BYTES))
            except (ConfigurationError, OSError):
                found[setting] = 0  # who reads the file says why
    return found


def _of(sinks: Iterable[str], settings: Iterable[str]) -> bool:
    """Return True if one of ``settings`` is of one of ``sinks``."""
    starts = tuple(f"{dotted(('sinks', name))}." for name in sinks)
    return any(setting.startswith(starts) for setting in settings)


def _close(sinks: Iterable[Sink]) -> None:
    for sink in sinks:
        sink.close()
