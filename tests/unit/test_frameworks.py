"""The oldest versions of frameworks: those that the page names are those that are tested."""

import re
from pathlib import Path

from tests.frameworks.__main__ import LOWEST, ROOT, TESTS, constraints, pins

ROW = re.compile(r"^\| (\w+) \| ([\d.]+) \| ([\d.]+) \|$", re.M)


def test_the_page_names_the_versions_that_are_tested() -> None:
    page = (ROOT / "docs/emitting.md").read_text().split("## Supported versions")[1]
    assert {name.lower(): oldest for name, oldest, _ in ROW.findall(page)} == pins(LOWEST)


def test_frameworks_alone_have_another_version_than_the_lock_file() -> None:
    locked, lowest = pins(ROOT / "requirements.lock"), constraints(lowest=True)
    assert {name for name, version in lowest.items() if locked.get(name) != version} == set(pins(LOWEST))
    assert not constraints(lowest=False).keys() & pins(LOWEST).keys()


def test_each_file_of_tests_is_there_and_none_of_a_framework_is_missing() -> None:
    found = {str(path.relative_to(ROOT)) for path in Path(ROOT, "tests").rglob("test_*.py")}
    assert set(TESTS) <= found
    of_frameworks = {path for path in found if re.search(r"contrib|django|sqlalchemy|alembic|fastapi|inbox_docs", path)}
    assert of_frameworks <= set(TESTS)
