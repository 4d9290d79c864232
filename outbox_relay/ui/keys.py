"""Keys of events, which may name a person: a URL contains a hash instead, an HMAC under a secret of the database.

All processes of a database have the same secret, so that a link works in each of them. Without it, guesses of a key
cannot be compared with a hash.
"""

from __future__ import annotations

import hmac
import re
from collections import OrderedDict
from collections.abc import Mapping
from typing import Final

from outbox_relay.domain.errors import NotFound, StatementFailed
from outbox_relay.postgres.store import Store
from outbox_relay.ui.forms import KEY_HASH

HASH_CHARS: Final = 32
BLOCK_BYTES: Final = 64
"""Size of a block of SHA-256, to which HMAC pads its secret."""
INNER, OUTER = 0x36, 0x5C
"""The constants of the two rounds of HMAC."""
REMEMBERED_MOST: Final = 10_000
"""Maximum number of keys whose hash is remembered."""
SEARCH_SECONDS: Final = 0.25
"""Time limit for finding the key of a hash among the rows."""
_HASH = re.compile(r"[0-9a-f]{32}")


class Keys:
    """The hashes of keys, and the keys that this process has shown, by their hash."""

    def __init__(self) -> None:
        self._secret = b""
        self._known: OrderedDict[str, str] = OrderedDict()

    def use(self, secret: bytes) -> None:
        """Hash under ``secret``, of at most ``BLOCK_BYTES``, from now on."""
        self._secret = secret

    def hash(self, key: str) -> str:
        """Return the first 32 hexadecimal digits of the HMAC-SHA-256 of ``key``."""
        assert self._secret, "the database gives the secret when it is connected"  # noqa: S101 - a fault of ours
        return hmac.digest(self._secret, key.encode(errors="surrogatepass"), "sha256").hex()[:HASH_CHARS]

    def remember(self, key: str) -> str:
        """Return the hash of ``key``, and remember it."""
        found = self.hash(key)
        self._known.pop(found, None)  # to the end
        self._known[found] = key
        while len(self._known) > REMEMBERED_MOST:
            self._known.popitem(last=False)
        return found

    def find(self, store: Store, wanted: str) -> str:
        """Return the key with the hash ``wanted``. Raises ``NotFound``."""
        if wanted in self._known:
            return self._known[wanted]
        if _HASH.fullmatch(wanted):
            given = {"hash": wanted, "inner": self._pad(INNER), "outer": self._pad(OUTER)}
            try:
                rows = store.named("key_of_hash", given, SEARCH_SECONDS)
            except StatementFailed:
                rows = []
            if rows:
                self.remember(rows[0].key)
                return rows[0].key
        raise NotFound("no key with this hash is known here: enter the key in the search box")

    def resolve(self, store: Store, fields: Mapping[str, str]) -> Mapping[str, str]:
        """Return ``fields``, with the field ``key`` if they select one by its hash. Raises ``NotFound``."""
        if not (wanted := fields.get(KEY_HASH, "").strip()):
            return fields
        return {**fields, "key": self.find(store, wanted)}

    def _pad(self, constant: int) -> bytes:
        return bytes(byte ^ constant for byte in self._secret.ljust(BLOCK_BYTES, b"\0"))
