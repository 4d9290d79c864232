"""The settings of this process, recorded in the database for ``config diff``."""

from __future__ import annotations

import json

from structlog.stdlib import BoundLogger

from outbox_relay.domain.errors import DatabaseUnusable, StatementFailed
from outbox_relay.domain.rate_limited_log import RateLimitedLog
from outbox_relay.postgres.connection_slots import CHORES, caller
from outbox_relay.postgres.store import Store
from outbox_relay.relay.leases import LeaseManager
from outbox_relay.settings import Settings
from outbox_relay.settings.effective import REFUSAL, recorded

CONFIG_BYTES = 64 << 10
"""Maximum size of recorded settings."""
REASON_CHARS = 500
"""Maximum length of the recorded reason of a refused reload."""


class RecordedConfig:
    """Records ``settings`` after each change, and whenever a heartbeat misses them."""

    def __init__(self, store: Store, lease_manager: LeaseManager, settings: Settings, log: BoundLogger) -> None:
        self._store = store
        self._lease_manager = lease_manager
        self._settings = settings
        self._log = RateLimitedLog(log)
        self._refusal: str | None = None

    def note_reload(self, refusal: str | None) -> None:
        """Record why the newest reload was refused, or None if it was carried out, as soon as possible."""
        if refusal != self._refusal:
            self._refusal = refusal
            self._lease_manager.unrecorded.set()

    def use(self, settings: Settings) -> None:
        """Record ``settings`` as soon as possible."""
        self._settings = settings
        self._lease_manager.unrecorded.set()

    async def run(self) -> None:
        """Record the settings until cancelled. Raises ``DatabaseUnavailable``.

        A failed statement is logged. The next heartbeat asks again.
        """
        caller.set(CHORES)
        unrecorded = self._lease_manager.unrecorded
        while True:
            await unrecorded.wait()
            unrecorded.clear()
            try:
                text = config_text(self._settings, await self._store.config_key(), self._refusal)
                await self._store.record_config(self._lease_manager.relay, text)
            except (StatementFailed, DatabaseUnusable) as error:
                self._log.warning("config.not_recorded", reason=str(error))


def config_text(settings: Settings, key: bytes, refusal: str | None = None) -> str:
    """Return the settings as JSON, with the reason of a refused reload; only their size if they are too large."""
    refused = {} if refusal is None else {REFUSAL: refusal[:REASON_CHARS]}
    text = json.dumps({**recorded(settings, key), **refused}).replace("\\u0000", "\\ufffd")
    return text if len(text) <= CONFIG_BYTES else json.dumps({"too_large": len(text)})
