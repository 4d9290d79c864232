"""The names of sinks in the settings, compared with those in the database."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from outbox_relay.settings import Settings


def former_names(settings: Settings, known: Collection[str], former: Mapping[str, str | None]) -> Iterator[str]:
    """Yield a problem for each sink of the settings that a relay would not serve.

    ``known`` are the sinks in the database, and ``former`` the names that sinks had, with their new names.
    """
    for name in settings.sinks:
        if name in known or name not in former:
            continue
        new, fix = former[name], f"run outbox-relay sinks remove {name} --forget"
        if new is None:
            said = f"this sink was removed from the database: take it out, or {fix}"
        else:
            said = f"this sink is now called {new} in the database: rename it here, too, or, for another sink, {fix}"
        yield settings.at(("sinks", name), said)


def new_names(settings: Settings, known: Collection[str], former: Mapping[str, str | None]) -> Iterator[str]:
    """Yield a warning for each new sink of the settings that may have another name in the database."""
    orphans = sorted(set(known) - set(settings.sinks) - set(former.values()))
    for name in settings.sinks:
        if name not in known and name not in former and orphans:
            begins = "at the beginning of the log" if settings.sinks[name].start == "beginning" else "now"
            yield settings.at(
                ("sinks", name),
                f"this sink is new and begins {begins}, while {', '.join(orphans)} has no settings any more; if it is "
                f"another name of it, run outbox-relay sinks rename {orphans[0]} {name} before relays start",
            )
