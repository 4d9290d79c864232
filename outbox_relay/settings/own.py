"""The relay's own database and HTTP port: no webhook is sent there. Here by what the settings say literally."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from ipaddress import ip_address
from urllib.parse import urlsplit

from outbox_relay.postgres import dsn
from outbox_relay.settings.model import Settings
from outbox_relay.settings.problems import Problem
from outbox_relay.settings.webhook import WebhookSettings

_LOCAL = ip_address("127.0.0.1")


def own_problems(settings: Settings, environ: Mapping[str, str]) -> Iterator[Problem]:
    """The webhooks whose URL leads to the relay's own database or HTTP port. Names are judged when it connects.

    ``environ`` has what a connection string leaves out.
    """
    own = {_plain(host, port): "database" for host, port in _database(settings, environ)}
    if settings.http.address is not None:
        own[_plain(*settings.http.address)] = "HTTP port"
    for name, sink in settings.sinks.items():
        if isinstance(sink, WebhookSettings) and (what := own.get(_destination(sink.url))) is not None:
            yield Problem(("sinks", name, "url"), f"leads to the relay's own {what}: name another host or port")


def _database(settings: Settings, environ: Mapping[str, str]) -> list[tuple[str, int]]:
    text = settings.database.dsn_text
    return [] if text is None else dsn.endpoints(text.get_secret_value(), environ)


def _destination(url: str) -> tuple[str, int]:
    parts = urlsplit(url)
    return _plain(parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80))


def _plain(host: str, port: int) -> tuple[str, int]:
    """One spelling for each host; all of this machine's own are one."""
    name = host.rstrip(".").lower()
    try:
        address = ip_address(name)
    except ValueError:
        return ("127.0.0.1" if name == "localhost" or name.endswith(".localhost") else name), port
    mapped = getattr(address, "ipv4_mapped", None) or address
    return str(_LOCAL if mapped.is_loopback or mapped.is_unspecified else mapped), port
