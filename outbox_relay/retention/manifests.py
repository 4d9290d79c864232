"""Manifests of archives, read to find out which archives hold a key."""

from __future__ import annotations

import json
from typing import Any

from outbox_relay.retention.files import Folder, without_query


def holds_key(address: str, key_hash: str, configured: str) -> bool | None:
    """Return True if the archive at ``address`` holds events of the key with this keyed hash, None if that is unknown.

    ``configured`` is the address of archives in the settings, whose options are used for archives below it. It is not
    known if the manifest cannot be read, or does not list all keys.
    """
    root, _, name = address.rpartition("/")
    options = configured if without_query(configured) == root else root
    try:
        manifest: dict[str, Any] = json.loads(Folder(options, name, existing=True).read("manifest.json"))
    except Exception:  # pyarrow is missing, or its file system failed in one of many ways
        return None
    if not manifest.get("key_hashes_complete"):
        return None
    return key_hash in manifest["key_hashes"]
