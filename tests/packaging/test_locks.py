"""The lock files: what the image holds is what the tests ran with, and pyproject.toml promises no less than that."""

import re
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from outbox_relay.workbench.demo.run import MODULES

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
EXTRAS: dict[str, list[str]] = PROJECT["project"]["optional-dependencies"]
GROUPS: dict[str, list[str | dict[str, str]]] = PROJECT["dependency-groups"]

DEV = [each for each in GROUPS["dev"] if isinstance(each, str)]

_PIN = re.compile(r"([a-z0-9][a-z0-9._-]*)==([^ ;\\]+)")


def pinned(name: str) -> dict[str, set[Version]]:
    """Package → versions of a lock file, more than one where Pythons differ; every entry has a hash."""
    found: dict[str, set[Version]] = {}
    for entry in re.split(r"\n(?=\w)", (ROOT / name).read_text(encoding="utf-8"))[1:]:
        pin = _PIN.match(entry)
        assert pin is not None, entry
        assert "--hash=sha256:" in entry, entry
        found.setdefault(pin[1], set()).add(Version(pin[2]))
    return found


@pytest.mark.parametrize("name", ["requirements-relay.lock", "requirements-build.lock"])
def test_the_image_holds_what_the_tests_ran_with(name: str) -> None:
    whole = pinned("requirements.lock")
    other = {package: versions for package, versions in pinned(name).items() if whole.get(package) != versions}
    assert not other, "make lock"


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        (
            "requirements.lock",
            [*EXTRAS["demo"], *EXTRAS["relay"], *EXTRAS["otel"], *EXTRAS["registry"], *EXTRAS["ui"], *DEV],
        ),
        ("requirements-relay.lock", [*EXTRAS["relay"], *EXTRAS["otel"], *EXTRAS["ui"]]),
        ("requirements-build.lock", PROJECT["build-system"]["requires"]),
    ],
)
def test_a_lock_satisfies_pyproject(name: str, wanted: list[str]) -> None:
    found = pinned(name)
    for requirement in map(Requirement, wanted):
        if requirement.name != PROJECT["project"]["name"]:
            versions = found.get(canonicalize_name(requirement.name), set())
            assert versions, f"{requirement} is missing: make lock"
            assert all(version in requirement.specifier for version in versions), f"{requirement}: make lock"


def test_the_wheel_is_made_by_what_is_locked_for_it() -> None:
    assert GROUPS["build"] == PROJECT["build-system"]["requires"]


@pytest.mark.parametrize("module", sorted(MODULES))
def test_the_extra_demo_brings_every_module_that_it_requires(module: str) -> None:
    """A module that only the tests install would stop both commands after `pip install outbox-relay[demo]`."""
    brought = {canonicalize_name(Requirement(text).name) for text in (*EXTRAS["demo"], *EXTRAS["relay"])}
    assert brought & set(map(canonicalize_name, packages_distributions()[module])), module
