"""The pages of the documentation: their blocks of code, commands, headings and links."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = (
    "README.md",
    "ARCHITECTURE.md",
    "CHANGELOG.md",
    *sorted(f"docs/{p.name}" for p in (ROOT / "docs").glob("*.md")),
)
"""Every page, by its path in the project."""

_FENCE = re.compile(r"( *)```(\w*)")
_INDENTED = re.compile(r" {4}(\S.*)")
_SPAN = re.compile(r"(?<!`)`([^`]+)`(?!`)")
_LINK = re.compile(r"\[[^][]*\]\(([^()\s]+)\)")
_HEADING = re.compile(r"#{1,6} +(.+)")


@dataclass(frozen=True)
class Block:
    """A fenced block of code: its place, its language, and its text without the indentation of the fences."""

    page: str
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        """Return its place, which is also the name of its test."""
        return f"{self.page}:{self.line}"


@cache
def text(page: str) -> str:
    """Return the text of a page."""
    return (ROOT / page).read_text(encoding="utf-8")


@cache
def blocks(*pages: str) -> tuple[Block, ...]:
    """Return the blocks of the given pages; without arguments, those of all pages."""
    return tuple(block for page in pages or PAGES for block in _parsed(page)[0])


@cache
def prose(page: str) -> str:
    """Return a page without its blocks."""
    return "\n".join(_parsed(page)[1])


@cache
def _parsed(page: str) -> tuple[list[Block], list[str]]:
    found: list[Block] = []
    outside: list[str] = []
    lines = iter(enumerate(text(page).splitlines(), 1))
    for number, line in lines:
        if not (fence := _FENCE.fullmatch(line)):
            assert "```" not in line, f"{page}:{number}: a fence that is not read"
            outside.append(line)
            continue
        indent, language = fence.groups()
        inside: list[str] = []
        for _, further in lines:
            if further == f"{indent}```":
                break
            inside.append(further.removeprefix(indent))
        else:
            raise AssertionError(f"{page}:{number}: a block without an end")
        found.append(Block(page, number, language, "\n".join(inside) + "\n"))
    return found, outside


def commands(block: Block) -> list[str]:
    """Return the command lines of a block of `sh`, or the lines after a prompt in other blocks."""
    joined = block.text.replace("\\\n", " ")
    if block.language == "sh":
        return [line.strip() for line in joined.splitlines() if line.strip() and not line.startswith("#")]
    return [line.removeprefix("$ ") for line in joined.splitlines() if line.startswith("$ ")]


def mentioned(page: str, program: str) -> list[list[str]]:
    """Return the arguments of `program` wherever it begins a line of indented code or a code span of the prose."""
    outside = prose(page)
    said = [found[1] for line in outside.splitlines() if (found := _INDENTED.fullmatch(line))]
    said += _SPAN.findall(outside.replace("\n", " "))
    return [shlex.split(line, comments=True)[1:] for line in said if line.split(" ")[0] == program]


def anchors(page: str) -> set[str]:
    """Return the anchors of a page, as GitHub names them."""
    found: set[str] = set()
    for line in prose(page).splitlines():
        if heading := _HEADING.fullmatch(line):
            slug = re.sub(r"[^\w\- ]", "", heading[1].strip().lower()).replace(" ", "-")
            assert slug not in found, f"{page}: two headings are {heading[1]!r}, which links cannot distinguish"
            found.add(slug)
    return found


def links(page: str) -> list[str]:
    """Return the targets of the links of a page, except those on other sites."""
    return [target for target in _LINK.findall(prose(page)) if not target.startswith(("https://", "http://"))]
