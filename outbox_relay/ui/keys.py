"""Keys of events, which may name a person: a URL contains their hash instead."""

from __future__ import annotations

import hashlib
import re
from collections import OrderedDict

from outbox_relay.domain.errors import NotFound, StatementFailed
from outbox_relay.postgres.store import Store

HASH_CHARS = 32
REMEMBERED_MOST = 10_000
"""Maximum number of keys whose hash is remembered."""
SEARCH_SECONDS = 0.25
"""Time limit for finding the key of a hash among the rows."""
_HASH = re.compile(r"[0-9a-f]{32}")


def key_hash(key: str) -> str:
    """Return the first 32 hexadecimal digits of the SHA-256 of ``key``."""
    return hashlib.sha256(key.encode(errors="surrogatepass")).hexdigest()[:HASH_CHARS]


class Keys:
    """The keys that this process has shown, by their hash."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, str] = OrderedDict()

    def remember(self, key: str) -> str:
        """Return the hash of ``key``, and remember it."""
        found = key_hash(key)
        self._known[found] = key
        self._known.move_to_end(found)
        while len(self._known) > REMEMBERED_MOST:
            self._known.popitem(last=False)
        return found

    async def find(self, store: Store, wanted: str) -> str:
        """Return the key with the hash ``wanted``. Raises ``NotFound``."""
        if wanted in self._known:
            return self._known[wanted]
        if _HASH.fullmatch(wanted):
            try:
                rows = await store.named("key_of_hash", {"hash": wanted}, SEARCH_SECONDS)
            except StatementFailed:
                rows = []
            if rows:
                self.remember(rows[0].key)
                return rows[0].key
        raise NotFound("no key with this hash is known here: enter the key in the search box")
