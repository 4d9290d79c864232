"""URLs of webhooks: one spelling, no credentials, no private address. Messages never repeat the URL."""

from __future__ import annotations

import re
from collections.abc import Sequence
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from urllib.parse import SplitResult, urlsplit

from outbox_relay.settings.addresses import REFUSED, Network, denied

URL_CHARS = 2048
"""Longest URL, in characters."""
EVERYWHERE = (ip_network("0.0.0.0/0"), ip_network("::/0"))
"""The networks of all addresses."""
LOOPBACK = "127.0.0.1"
"""The canonical name of this machine."""

_LABEL = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?")
_NUMERIC = re.compile(r"\d+|0[xX][0-9a-fA-F]*")


def canonical_host(host: str) -> str:
    """Return one spelling for all spellings of a host; every address of this machine is ``LOOPBACK``."""
    name = host.rstrip(".").lower()
    try:
        address = ip_address(name)
    except ValueError:
        return LOOPBACK if name == "localhost" or name.endswith(".localhost") else name
    plain = getattr(address, "ipv4_mapped", None) or address
    return LOOPBACK if plain.is_loopback or plain.is_unspecified else str(plain)


def check_url(url: str, *, allow_http: bool, allowed: Sequence[Network], refused: Sequence[Network] = ()) -> None:
    """Raise ValueError, with the fix and without the URL, unless a webhook may be sent to ``url``.

    ``allowed`` are the networks that may be addressed although they are private, ``refused`` those that never are.
    """
    parts = _split(url)
    if parts.scheme == "http" and not allow_http:
        raise ValueError("plain http is refused: use https, or set allow_http = true")
    if parts.scheme not in ("http", "https"):
        raise ValueError("should begin with https://")
    if "@" in parts.netloc:
        raise ValueError("holds credentials before the host: remove them, requests are signed")
    if "#" in url:
        raise ValueError("holds a fragment (#…), which is never sent: remove it")
    _check_host(parts, allowed, refused)


def proxy_endpoint(url: str) -> tuple[str, int]:
    """Return host and port of a forward proxy. Raises ValueError, with the fix and without the URL, if it is wrong."""
    parts = _split(url)
    if parts.scheme != "http" or parts.path not in ("", "/") or "?" in url or "#" in url:
        raise ValueError("should be http://HOST:PORT: the connection to a proxy has no TLS and no path")
    if "@" in parts.netloc:
        raise ValueError("holds credentials before the host: put them into proxy_authorization_file")
    _check_host(parts, EVERYWHERE, ())
    if parts.hostname is None or parts.port is None:
        raise ValueError("has no port: write http://HOST:PORT")
    return parts.hostname, parts.port


def _split(url: str) -> SplitResult:
    if not url or len(url) > URL_CHARS:
        raise ValueError(f"should be a URL of 1 to {URL_CHARS} characters")
    if not re.fullmatch(r"[!-\[\]-~]+", url):
        raise ValueError("holds a space, a control character, a backslash or a letter beyond ASCII: percent-encode it")
    try:
        return urlsplit(url)
    except ValueError:
        raise ValueError("has a host between [ and ] that is no IPv6 address") from None


def _check_host(parts: SplitResult, allowed: Sequence[Network], refused: Sequence[Network]) -> None:
    try:
        wrong_port = parts.port == 0 or parts.netloc.endswith(":")
    except ValueError:
        wrong_port = True
    if wrong_port:
        raise ValueError("has a wrong port: 1 to 65535, or none")
    host = (parts.hostname or "").removesuffix(".")
    if not host:
        raise ValueError("has no host")
    if parts.netloc.startswith("[") or _NUMERIC.fullmatch(host.rpartition(".")[2]):
        _check_address(host, allowed, refused, in_brackets=parts.netloc.startswith("["))
    else:
        _check_name(host, allowed, refused)


def _check_name(host: str, allowed: Sequence[Network], refused: Sequence[Network]) -> None:
    if len(host) > 253 or not all(_LABEL.fullmatch(label) for label in host.split(".")):
        raise ValueError(
            "has a host that is no name: letters, digits, hyphens and dots, at most 63 between dots; "
            "international names in their xn-- form"
        )
    if canonical_host(host) == LOOPBACK and all(denied(address, allowed, refused) for address in (LOOPBACK, "::1")):
        raise ValueError('leads to this machine: list "127.0.0.0/8" in allow_networks if it should')


def _check_address(host: str, allowed: Sequence[Network], refused: Sequence[Network], *, in_brackets: bool) -> None:
    if "%" in host:
        raise ValueError("has an address with a zone: write it without")
    try:
        address = IPv6Address(host) if in_brackets else IPv4Address(host)
    except ValueError:
        raise ValueError(
            "has a host between [ and ] that is no IPv6 address"
            if in_brackets
            else "has a host that is neither a name nor an address: write all four decimal numbers"
        ) from None
    kind = denied(address, allowed, refused)
    if kind == REFUSED:
        raise ValueError(f"leads to the address {address}, which lies in a network of deny_networks")
    if kind:
        raise ValueError(f"leads to the {kind} address {address}: list its network in allow_networks if it should")
