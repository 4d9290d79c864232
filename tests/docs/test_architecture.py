"""The tables of ARCHITECTURE.md: every room is a folder, every module is named, and every fence has a test."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, text

PACKAGE = ROOT / "outbox_relay"


def table(heading: str) -> list[list[str]]:
    """Return the cells of the first table under a heading, without its head."""
    section = text("ARCHITECTURE.md").split(f"## {heading}\n")[1].split("\n## ")[0]
    lines = section[section.index("\n|") + 1 :].split("\n\n")[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[2:]]


@cache
def known_tests() -> set[str]:
    """Return the names of all tests."""
    files = (path.read_text(encoding="utf-8") for path in Path(ROOT / "tests").rglob("test_*.py"))
    return {name for file in files for name in re.findall(r"^(?:async )?def (test_\w+)\(", file, re.MULTILINE)}


FENCES = table("Fences")


@pytest.mark.parametrize("fence", FENCES, ids=[fence[0] for fence in FENCES])
def test_every_fence_has_a_test(fence: list[str]) -> None:
    assert len(fence) == 4
    named = re.findall(r"`(test_\w+)`", fence[3])
    assert named
    assert set(named) <= known_tests()


def test_the_rooms_are_those_of_the_package() -> None:
    rooms = {cells[0].strip("`") for cells in table("Where things are")}
    there = [path for path in PACKAGE.iterdir() if not path.name.startswith("__") and path.suffix in ("", ".py")]
    assert rooms == {path.stem for path in there}


@pytest.mark.parametrize("room", ["relay", "service", "postgres", "ui"])
def test_every_module_of_a_room_is_named(room: str) -> None:
    section = text("ARCHITECTURE.md").split(f"Inside `{room}`")[1].split("\n\n")[1]
    named = [name for row in section.splitlines()[2:] for name in re.findall(r"`(\w+)`", row.split(" | ")[0])]
    parts = [path for path in (PACKAGE / room).iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()]
    there = sorted(path.stem for path in parts if path.stem != "__init__")
    assert sorted(named) == there
