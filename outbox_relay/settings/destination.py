"""URLs of webhooks: one spelling, no credentials, no private address. Messages never repeat the URL."""

from __future__ import annotations

import re
from collections.abc import Sequence
from ipaddress import IPv6Address, ip_address, ip_network
from urllib.parse import SplitResult, urlsplit

from outbox_relay.settings.addresses import REFUSED, Network, denied

URL_CHARS = 2048
"""Longest URL, in characters."""

EVERYWHERE = (ip_network("0.0.0.0/0"), ip_network("::/0"))
"""The networks of all addresses."""

_VISIBLE = re.compile(r"[!-~]+")
_LABEL = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?")
_NUMERIC = re.compile(r"\d+|0[xX][0-9a-fA-F]*")
_LOOPBACK = ("127.0.0.1", "::1")


def check_url(url: str, *, allow_http: bool, allowed: Sequence[Network], refused: Sequence[Network] = ()) -> None:
    """Raise ValueError, with the fix and without the URL, unless a webhook may be sent to ``url``.

    ``allowed`` are the networks that may be addressed although they are private, ``refused`` those that never are.
    """
    parts = _split(url)
    if parts.scheme != "https" and not (parts.scheme == "http" and allow_http):
        raise ValueError(
            "plain http is refused: use https, or set allow_http = true"
            if parts.scheme == "http"
            else "should begin with https://"
        )
    if "@" in parts.netloc:
        raise ValueError("holds credentials before the host: take them out, requests are signed")
    if "#" in url:
        raise ValueError("holds a fragment (#…), which is never sent: take it out")
    _check_port(parts)
    _check_host(parts, allowed, refused)


def proxy_endpoint(url: str) -> tuple[str, int]:
    """Host and port of a forward proxy. Raises ValueError, with the fix and without the URL, when it is none."""
    parts = _split(url)
    if parts.scheme != "http" or parts.path not in ("", "/") or "?" in url or "#" in url:
        raise ValueError("should be http://HOST:PORT: proxies are spoken to without TLS, and have no path")
    if "@" in parts.netloc:
        raise ValueError("holds credentials before the host: put them into proxy_authorization_file")
    _check_port(parts)
    _check_host(parts, EVERYWHERE, ())
    if parts.hostname is None or parts.port is None:
        raise ValueError("has no port: write http://HOST:PORT")
    return parts.hostname, parts.port


def _split(url: str) -> SplitResult:
    if not url or len(url) > URL_CHARS:
        raise ValueError(f"should be a URL of 1 to {URL_CHARS} characters")
    if not _VISIBLE.fullmatch(url) or "\\" in url:
        raise ValueError("holds a space, a control character, a backslash or a letter beyond ASCII: percent-encode it")
    try:
        return urlsplit(url)
    except ValueError:
        raise ValueError("is no URL: the host between [ and ] is no IPv6 address") from None


def _check_port(parts: SplitResult) -> None:
    try:
        port = parts.port
    except ValueError:
        port = 0
    if port == 0 or parts.netloc.endswith(":"):
        raise ValueError("has a wrong port: 1 to 65535, or none")


def _check_host(parts: SplitResult, allowed: Sequence[Network], refused: Sequence[Network]) -> None:
    host = (parts.hostname or "").removesuffix(".")
    if not host:
        raise ValueError("has no host")
    if parts.netloc.startswith("["):
        _check_address(_ipv6(host), allowed, refused)
    elif _NUMERIC.fullmatch(host.rpartition(".")[2]):
        _check_address(_ipv4(host), allowed, refused)
    else:
        _check_name(host, allowed, refused)


def _ipv6(host: str) -> str:
    if "%" in host:
        raise ValueError("has an address with a zone: write it without")
    try:
        return str(IPv6Address(host))
    except ValueError:
        raise ValueError("has a host between [ and ] that is no IPv6 address") from None


def _ipv4(host: str) -> str:
    try:
        return str(ip_address(host))
    except ValueError:
        raise ValueError("has a host that is neither a name nor an address: write all four decimal numbers") from None


def _check_name(host: str, allowed: Sequence[Network], refused: Sequence[Network]) -> None:
    labels = host.split(".")
    if len(host) > 253 or not all(_LABEL.fullmatch(label) for label in labels):
        raise ValueError(
            "has a host that is no name: letters, digits, hyphens and dots, at most 63 between dots; "
            "international names in their xn-- form"
        )
    if labels[-1] == "localhost" and all(denied(address, allowed, refused) for address in _LOOPBACK):
        raise ValueError('leads to this machine: list "127.0.0.0/8" in allow_networks if it should')


def _check_address(address: str, allowed: Sequence[Network], refused: Sequence[Network]) -> None:
    kind = denied(address, allowed, refused)
    if kind == REFUSED:
        raise ValueError(f"leads to the address {address}, which lies in a network of deny_networks")
    if kind:
        raise ValueError(f"leads to the {kind} address {address}: list its network in allow_networks if it should")
