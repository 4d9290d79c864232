"""ARCHITECTURE.md: its table has every room, and every path on the page is there."""

from __future__ import annotations

import re

from tests.docs.pages import ROOT, text

PACKAGE = ROOT / "outbox_relay"


def test_the_rooms_are_those_of_the_package() -> None:
    section = text("ARCHITECTURE.md").split("## Rooms\n")[1].split("\n## ")[0]
    rooms = {name for row in re.findall(r"^\|(.*?)\|", section, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)}
    there = [path for path in PACKAGE.iterdir() if not path.name.startswith("__") and path.suffix in ("", ".py")]
    assert rooms == {path.stem for path in there}


def test_every_path_is_there() -> None:
    paths = re.findall(r"`([\w.]+/[\w./]*)`", text("ARCHITECTURE.md"))
    assert len(paths) > 10
    assert [path for path in paths if not ((PACKAGE / path).exists() or (ROOT / path).exists())] == []
