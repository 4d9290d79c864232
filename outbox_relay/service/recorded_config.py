"""The settings of this process, recorded in the database for ``doctor`` and the page."""

from __future__ import annotations

import json

from structlog.stdlib import BoundLogger

from outbox_relay.domain.errors import RelayError
from outbox_relay.domain.log_events import RateLimitedLog
from outbox_relay.postgres.store import Store
from outbox_relay.relay.keeper import Keeper
from outbox_relay.settings import Settings
from outbox_relay.settings.effective import REFUSAL, recorded

CONFIG_BYTES = 64 << 10
"""Maximum size of recorded settings."""
REASON_CHARS = 500
"""Maximum length of the recorded reason of a refused reload."""


class RecordedConfig:
    """Records ``settings`` after each change, and whenever a heartbeat misses them."""

    def __init__(self, store: Store, keeper: Keeper, settings: Settings, log: BoundLogger) -> None:
        self._store = store
        self._keeper = keeper
        self._settings = settings
        self._log = RateLimitedLog(log)
        self._refusal: str | None = None

    def note_reload(self, refusal: str | None) -> None:
        """Record why the newest reload was refused, or None if it was carried out, as soon as possible."""
        if refusal != self._refusal:
            self._refusal = refusal
            self._keeper.unrecorded.set()

    def use(self, settings: Settings) -> None:
        """Record ``settings`` as soon as possible."""
        self._settings = settings
        self._keeper.unrecorded.set()

    def record(self) -> None:
        """Record the settings if they have changed, or a heartbeat has missed them.

        A failed statement is logged. The next heartbeat asks again.
        """
        if not self._keeper.unrecorded.is_set():
            return
        self._keeper.unrecorded.clear()
        try:
            text = config_text(self._settings, self._store.config_key(), self._refusal)
            self._store.record_config(self._keeper.relay, text)
        except RelayError as error:
            self._log.warning("config.not_recorded", reason=str(error))


def config_text(settings: Settings, key: bytes, refusal: str | None = None) -> str:
    """Return the settings as JSON, with the reason of a refused reload; only their size if they are too large."""
    refused = {} if refusal is None else {REFUSAL: refusal[:REASON_CHARS]}
    text = json.dumps({**recorded(settings, key), **refused}).replace("\\u0000", "\\ufffd")
    return text if len(text) <= CONFIG_BYTES else json.dumps({"too_large": len(text)})
