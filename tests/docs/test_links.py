"""The links between pages, and the index of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.pages import PAGES, ROOT, anchors, links, text


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    for link in links(page):
        path, _, anchor = link.partition("#")
        target = (ROOT / page).parent / path if path else ROOT / page
        assert target.exists(), f"{page}: {link}"
        if anchor:
            name = target.resolve().relative_to(ROOT).as_posix()
            assert anchor in anchors(name), f"{page}: {link}"


@pytest.mark.parametrize("page", [page for page in PAGES if page.startswith("docs/") and page != "docs/README.md"])
def test_the_index_names_every_page(page: str) -> None:
    assert Path(page).name in links("docs/README.md")


def test_the_readme_leads_to_the_index() -> None:
    assert "docs/README.md" in links("README.md")


def test_the_guarantees_are_the_same_words() -> None:
    section = text("README.md").split("## Guarantees\n")[1].split("\n## ")[0]
    promised = section[section.index("1. ") :].split("\n\n")[0]
    assert promised.count("**") == 8
    assert promised in text("docs/guarantees.md")
