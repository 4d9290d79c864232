"""compose.yaml as a test reads it: its variables filled in, its services with what they run and see."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

ROOT = Path(__file__).parents[2]
FILE = ROOT / "compose.yaml"
SECRETS = "/run/secrets"

_VARIABLE = re.compile(r"\$\{(\w+):-([^}]*)\}")


@dataclass(frozen=True)
class Mount:
    """A file or folder of this tree, and where a container has it."""

    source: Path
    target: str


@dataclass(frozen=True)
class Service:
    """A service that runs our image: what replaces the image's entry point and command, and what it sees."""

    name: str
    entrypoint: Sequence[str] | None
    command: Sequence[str] | None
    environment: Mapping[str, str]
    mounts: Sequence[Mount]

    def arguments(self, entrypoint: Sequence[str], command: Sequence[str]) -> list[str]:
        """Return the arguments in an image with this entry point and command; an entry point of its own drops both."""
        if self.entrypoint is not None:
            return [*self.entrypoint, *(self.command or ())]
        return [*entrypoint, *(command if self.command is None else self.command)]


def read() -> dict[str, Any]:
    """Return the file with the default of every variable. Raises AssertionError if one has none."""
    text = FILE.read_text(encoding="utf-8")
    bare = [line for line in text.splitlines() if "$" in _VARIABLE.sub("", line)]
    assert not bare, f"variables without a default: {bare}"
    yaml: Any = YAML(typ="safe", pure=True)
    return yaml.load(_VARIABLE.sub(r"\2", text))


def service(name: str) -> Service:
    """Return one of the services that run our image."""
    whole = read()
    found = whole["services"][name]
    configs, secrets = whole["configs"], whole["secrets"]
    mounts = [
        *(Mount(ROOT / source, target) for source, target in map(_bind, found.get("volumes", ()))),
        *(Mount(ROOT / configs[config["source"]]["file"], config["target"]) for config in found.get("configs", ())),
        *(Mount(ROOT / secrets[secret]["file"], f"{SECRETS}/{secret}") for secret in found.get("secrets", ())),
    ]
    return Service(name, found.get("entrypoint"), found.get("command"), found.get("environment", {}), mounts)


def _bind(volume: str) -> tuple[str, str]:
    source, target, mode = volume.split(":")
    assert mode == "ro", f"{volume}: what is mounted from the tree is not written to"
    return source, target
