"""The command config show."""

from __future__ import annotations

import argparse
import json
import os
from typing import Any

from outbox_relay.cli.command import add_command, add_group, load_settings
from outbox_relay.cli.output import DONE


def add(commands: Any) -> None:
    """Add the commands of this module."""
    actions = add_group(commands, "config", "show the settings in effect")
    shown = add_command(actions, "show", _show, "show every setting in effect; secrets as …")
    shown.add_argument("--json", action="store_true", help="print JSON")


def _show(arguments: argparse.Namespace) -> int:
    from outbox_relay.settings import effective

    loaded = load_settings(arguments)
    found, secrets = effective.shown(loaded), effective.fingerprints(loaded, os.environ)
    if arguments.json:
        print(json.dumps({**found, "fingerprints": {name: each._asdict() for name, each in secrets.items()}}))
        return DONE
    for name, value in found.items():
        comment = f"  # {secrets[name]}" if name in secrets else ""
        print(f"{name} = {json.dumps(value, ensure_ascii=False)}{comment}")
    return DONE
