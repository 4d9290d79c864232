"""Commands on settings: config show, config diff."""

from __future__ import annotations

import argparse
import json
import os
from typing import Any

from outbox_relay.cli.command import add_command, add_group, load_settings, query
from outbox_relay.cli.output import DONE, say
from outbox_relay.domain.file_reading import FILES


def add(commands: Any) -> None:
    """Add the commands of this module."""
    actions = add_group(commands, "config", "show the settings in effect, and how those of the relays differ")
    shown = add_command(actions, "show", _show, "show every setting in effect; secrets as …")
    diff = add_command(actions, "diff", _diff, "show the settings in which the live relays differ from the file")
    for parser in (shown, diff):
        parser.add_argument("--json", action="store_true", help="print JSON")


def _show(arguments: argparse.Namespace) -> int:
    from outbox_relay.settings import effective

    loaded = load_settings(arguments)
    found, secrets = effective.shown(loaded), FILES.call(lambda: effective.fingerprints(loaded, os.environ))
    if arguments.json:
        print(json.dumps({**found, "fingerprints": {name: each._asdict() for name, each in secrets.items()}}))
        return DONE
    for name, value in found.items():
        comment = f"  # {secrets[name]}" if name in secrets else ""
        print(f"{name} = {json.dumps(value, ensure_ascii=False)}{comment}")
    return DONE


def _diff(arguments: argparse.Namespace) -> int:
    from outbox_relay.admin import config, render_sinks

    ours = load_settings(argparse.Namespace(config=arguments.config, dsn=None))
    found = query(arguments, lambda store: config.diff(store, ours))
    if found.unknown:
        say(f"these relays have not recorded their settings: {', '.join(found.unknown)}")
    if not found.relays:
        say("no relay is alive")
    shown = {"differences": found.differences}
    print(json.dumps(shown) if arguments.json else render_sinks.differences_text(found.differences))
    return DONE
