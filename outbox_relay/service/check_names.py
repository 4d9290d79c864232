"""The names of sinks in the settings, compared with those in the database."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from outbox_relay.settings import Settings


def former_names(settings: Settings, known: Collection[str], former: Collection[str]) -> Iterator[str]:
    """Yield a problem for each sink of the settings that a relay would not serve.

    ``known`` are the sinks in the database, and ``former`` the names that removed sinks had.
    """
    for name in settings.sinks:
        if name not in known and name in former:
            fix = f"take it out, or run outbox-relay sinks remove {name} --forget"
            yield settings.at(("sinks", name), f"this sink was removed from the database: {fix}")


def new_names(settings: Settings, known: Collection[str], former: Collection[str]) -> Iterator[str]:
    """Yield a warning for each new sink of the settings that may have another name in the database."""
    orphans = sorted(set(known) - set(settings.sinks))
    for name in settings.sinks:
        if name not in known and name not in former and orphans:
            begins = "at the beginning of the log" if settings.sinks[name].start == "beginning" else "now"
            yield settings.at(
                ("sinks", name),
                f"this sink is new and begins {begins}, while {', '.join(orphans)} has no settings any more; if it is "
                f"another name of it, keep the name {orphans[0]}",
            )
