"""Folders of migrations like those of an earlier version."""

import shutil
from pathlib import Path

from outbox_relay.postgres.schema_versions import SCHEMA_FOLDER


def schema_up_to(version: int, place: Path) -> Path:
    """Copy the schema into `place` without the migrations after `version`, and return `place`."""
    shutil.copytree(SCHEMA_FOLDER, place)
    for path in place.glob("[0-9]*.sql"):
        if int(path.name[:4]) > version:
            path.unlink()
    return place
