"""Packages with a plug-in, written where Python finds them."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from textwrap import dedent

from outbox_relay.sinks import types

PREAMBLE = """
import os, sys, time
from pathlib import Path
from typing import Annotated, Literal
from pydantic import BaseModel, Field, SecretStr, field_validator
from outbox_relay.sinks import *
"""
GOOD = """
class Settings(PluginSettings):
    file: Path = Path("/dev/null")
    names: list[str] = []
    limits: dict[str, int] = {}
    token: SecretStr = SecretStr("")
    note: str = ""
    stream: Annotated[str, SHOWN] = "orders"
    mode: Literal["fast", "slow"] = "fast"
    size: int = Field(default=1, le=10)


class Good:
    API_VERSION = 1
    Settings = Settings
    keeps_order = False
    max_batch = 1
    max_in_flight = 8

    def __init__(self, settings, context):
        self.settings, self.context = settings, context

    def deliver(self, events, deadline):
        with self.settings.file.open("a") as file:
            file.writelines(f"{event.uid}\\n" for event in events)
        return [DELIVERED for _ in events]
"""
"""A plug-in that writes uids to a file. Others extend its class."""


def write_plugin(
    directory: Path, kind: str, code: str = "", name: str = "Good", *, package: str = "", good: str = GOOD
) -> Path:
    """Write a package that registers `name` of a module with `code` under the type `kind`; return `directory`."""
    package = package or f"plugin-{kind}"
    module = package.replace("-", "_")
    (directory / f"{module}.py").write_text(f"{PREAMBLE}{good}{dedent(code)}", encoding="utf-8")
    information = directory / f"{module}-1.0.dist-info"
    information.mkdir(exist_ok=True)
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text(f"[{types.GROUP}]\n{kind} = {module}:{name}\n")
    return directory


def forget_plugins() -> None:
    """Forget every plug-in that was loaded or refused, which no relay does. Modules stay imported."""
    types._loaded.clear()  # pyright: ignore[reportPrivateUsage]
    types.forget_refusals()


@contextmanager
def on_path(directory: Path) -> Generator[None]:
    """Let Python find packages in `directory` inside the block, and forget them afterwards."""
    before = set(sys.modules)
    sys.path.insert(0, str(directory))
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path.remove(str(directory))
        for name in sys.modules.keys() - before:
            if str(directory) in str(getattr(sys.modules[name], "__file__", "")):
                del sys.modules[name]
        forget_plugins()
