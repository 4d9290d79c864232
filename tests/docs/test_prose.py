"""The English of the pages: no phrase that reads as a translation."""

from __future__ import annotations

import re

import pytest

from tests.docs.pages import PAGES, ROOT, prose

TEXTS = {page: prose(page) for page in (*PAGES, "CONTRIBUTING.md")} | {
    "config/relay.example.toml": (ROOT / "config" / "relay.example.toml").read_text(encoding="utf-8")
}
PHRASES = re.compile(
    r"\b(anew|for ever|whoever|nobody|somebody|everybody|goes on|stands still|stood|so many|(?:is|are|was|were) told|"
    r"says so|beside it|ends dead|makes no|gives? up|in hand)\b|; nothing:"
    r"|\b\d+(?:\.\d+)? (?:s|ms|MB|MiB|GB) at most\b",
    re.IGNORECASE,
)
QUOTED = re.compile(r'`[^`]*`|"[^"]*"')


@pytest.mark.parametrize("page", TEXTS)
def test_no_phrase_reads_as_a_translation(page: str) -> None:
    text = QUOTED.sub("", " ".join(TEXTS[page].split()))
    assert [text[max(0, found.start() - 40) : found.end() + 20] for found in PHRASES.finditer(text)] == []
