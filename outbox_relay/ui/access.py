"""Authentication: anyone on loopback, names and passwords, a trusted proxy, tokens, or the application around it."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import os
import time
from base64 import b64decode
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Final, NamedTuple, Protocol, TypeAlias

from starlette.requests import HTTPConnection

from outbox_relay.domain.errors import ConfigurationError
from outbox_relay.service.logs import logger
from outbox_relay.ui.users import FileContent, User, UserEntry, token_digest, verify_password

Network: TypeAlias = ipaddress.IPv4Network | ipaddress.IPv6Network
IPAddress: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address
Authenticate: TypeAlias = Callable[[HTTPConnection], User | Awaitable[User | None] | None]
"""Returns the user of a request, or None if it has none."""

REMEMBERED_SECONDS: Final = 300.0
"""Time for which a password that was right is not hashed again."""
REMEMBERED_MOST: Final = 1000
FAILURES_MOST, FAILURES_OF_ADDRESS = 10, 100
"""Failures in ``FAILURES_SECONDS`` after which passwords are not looked at: those of one name from one address, and all
of that address, which may be a proxy's."""
FAILURES_SECONDS: Final = 60.0
ADDRESSES_MOST: Final = 10_000
"""Maximum number of addresses whose failures are counted."""
HASHES_AT_ONCE: Final = 2
"""Maximum number of passwords that are hashed at once, each with 16 MiB."""
WAITING_MOST: Final = 16
"""Maximum number of requests whose password waits to be hashed."""
HEADER_BYTES: Final = 4096
"""Maximum length of a header that names a user."""
BLANK: Final = " \t"
"""Blanks around the value of a header. Other ones may be bytes of UTF-8."""
UNKNOWN: Final = "scrypt$16384$8$5$AAAAAAAAAAAAAAAAAAAAAA==$AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA="
"""A hash that no password has. An unknown name takes as long as a known one."""


class Refusal(NamedTuple):
    """The answer to a request that is not let in: its status, a sentence, and its own headers."""

    status: int
    reason: str
    headers: Mapping[str, str] = {}


def _ask(challenge: str, reason: str) -> Refusal:
    """Return the refusal that asks for a user."""
    return Refusal(401, reason, {"www-authenticate": challenge})


class Access(Protocol):
    """A way to find out who uses the page."""

    async def user(self, request: HTTPConnection) -> User | Refusal:
        """Return the user of ``request``, or why there is none."""
        ...


class Anyone:
    """One user for every request. Safe only on loopback, and with a check of the header ``Host``."""

    def __init__(self, user: User) -> None:
        self._user = user

    async def user(self, request: HTTPConnection) -> User | Refusal:  # noqa: ARG002 - as Access says
        """Return the one user."""
        return self._user


class Failures:
    """The number of wrong passwords or tokens by key, within bounds. After ``most`` of them, a key has to wait."""

    def __init__(self, most: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._most = most
        self._clock = clock
        self._counts: OrderedDict[str, tuple[int, float]] = OrderedDict()

    def blocked(self, key: str) -> bool:
        """Return True if ``key`` has failed too often in the last minute."""
        count, began = self._counts.get(key, (0, 0.0))
        return count >= self._most and self._clock() - began < FAILURES_SECONDS

    def add(self, key: str) -> None:
        """Count a failure of ``key``, and log the one after which it has to wait."""
        count, began = self._counts.pop(key, (0, self._clock()))
        if self._clock() - began >= FAILURES_SECONDS:
            count, began = 0, self._clock()
        self._counts[key] = (count + 1, began)
        if count + 1 == self._most:
            logger().warning("ui.too_many_failures", of=key)
        while len(self._counts) > ADDRESSES_MOST:
            self._counts.popitem(last=False)


class Basic:
    """Names and passwords of a file, by HTTP's Basic authentication."""

    CHALLENGE: Final = 'Basic realm="outbox-relay", charset="UTF-8"'

    def __init__(self, users: FileContent[dict[str, UserEntry]], clock: Callable[[], float] = time.monotonic) -> None:
        self._users = users
        self._clock = clock
        self._by_name = Failures(FAILURES_MOST, clock)
        self._by_address = Failures(FAILURES_OF_ADDRESS, clock)
        self._secret = os.urandom(32)
        self._remembered: OrderedDict[bytes, float] = OrderedDict()
        self._hashing = asyncio.Semaphore(HASHES_AT_ONCE)
        self._waiting = 0

    async def user(self, request: HTTPConnection) -> User | Refusal:
        """Return the user whose name and password ``request`` has."""
        if (given := _credentials(request)) is None:
            return _ask(self.CHALLENGE, "give your name and password")
        name, password = given
        account = (await asyncio.to_thread(self._users.current)).get(name)
        stored = account.hash if account and account.hash else UNKNOWN
        mark = hmac.digest(self._secret, "\0".join((name, stored, password)).encode(errors="surrogatepass"), "sha256")
        if account and self._clock() < self._remembered.get(mark, 0.0):
            return account.user
        is_right = await self._verify(client_group(request), name, password, stored)
        if is_right is None:
            return Refusal(429, "too many wrong passwords: try again in a minute")
        if not is_right or account is None:
            return _ask(self.CHALLENGE, "the name or the password is wrong")
        self._remember(mark)
        return account.user

    async def _verify(self, address: str, name: str, password: str, stored: str) -> bool | None:
        """Return True if the password is right, False if it is wrong, None if it is not looked at."""
        if self._waiting >= WAITING_MOST:
            return None
        of_name = f"{address} {name[:64]!a}"
        self._waiting += 1
        try:
            async with self._hashing:
                if self._by_name.blocked(of_name) or self._by_address.blocked(address):
                    return None
                is_right = await asyncio.to_thread(verify_password, password, stored)
                if not is_right:
                    self._by_name.add(of_name)
                    self._by_address.add(address)
                return is_right
        finally:
            self._waiting -= 1

    def _remember(self, mark: bytes) -> None:
        self._remembered[mark] = self._clock() + REMEMBERED_SECONDS
        while len(self._remembered) > REMEMBERED_MOST:
            self._remembered.popitem(last=False)


class TrustedProxy:
    """The user whom a trusted proxy names in a header. One who is not in the users' file is a viewer."""

    def __init__(
        self, header: str, trusted: Sequence[Network], users: FileContent[dict[str, UserEntry]] | None = None
    ) -> None:
        self._header = header
        self._trusted = trusted
        self._users = users

    async def user(self, request: HTTPConnection) -> User | Refusal:
        """Return the user whom the proxy has named."""
        address = client_ip(request)
        if address is None or not any(address in network for network in self._trusted):
            return Refusal(403, "requests are answered only if they come through the proxy")
        names = request.headers.getlist(self._header)
        if len(names) != 1 or not names[0].strip(BLANK) or len(names[0]) > HEADER_BYTES:
            return Refusal(401, f"the proxy has not named a user in {self._header}")
        name = _decoded(names[0].strip(BLANK))
        account = (await asyncio.to_thread(self._users.current)).get(name) if self._users else None
        return account.user if account else User("".join(c if c.isprintable() else "?" for c in name)[:64], "viewer")


class Tokens:
    """Bearer tokens of a file, for the API."""

    CHALLENGE: Final = 'Bearer realm="outbox-relay"'

    def __init__(self, tokens: FileContent[dict[bytes, User]]) -> None:
        self._tokens = tokens
        self._failures = Failures(FAILURES_OF_ADDRESS)

    async def user(self, request: HTTPConnection) -> User | Refusal:
        """Return the user of the token that ``request`` has."""
        token = request.headers.get("authorization", "")[:HEADER_BYTES].partition(" ")[2].strip()
        found = (await asyncio.to_thread(self._tokens.current)).get(token_digest(token))
        if found is None:  # a token is too long to be guessed, so others of this address need not wait
            self._failures.add(client_group(request))
            return _ask(self.CHALLENGE, "the token is not known")
        return found


class Host:
    """The user whom the application names that has mounted the page."""

    def __init__(self, authenticate: Authenticate) -> None:
        self._authenticate = authenticate

    async def user(self, request: HTTPConnection) -> User | Refusal:
        """Return the user whom the application names."""
        found = self._authenticate(request)
        if not isinstance(found, User) and found is not None:
            found = await found
        return found or Refusal(401, "the application knows no user of this request")


def _decoded(value: str) -> str:
    """Return the value of a header, which proxies send in UTF-8."""
    try:
        return value.encode("latin-1").decode()
    except ValueError:
        return value


def is_bearer(request: HTTPConnection) -> bool:
    """Return True if ``request`` has a bearer token, which no browser adds by itself."""
    return request.headers.get("authorization", "")[:7].lower() == "bearer "


def client_ip(request: HTTPConnection) -> IPAddress | None:
    """Return the address at the other end of the connection, one of IPv4 in its own form, or None if it has none."""
    try:
        found = ipaddress.ip_address(request.client.host if request.client else "")
    except ValueError:
        return None
    return (found.ipv4_mapped or found) if isinstance(found, ipaddress.IPv6Address) else found


def client_group(request: HTTPConnection) -> str:
    """Return the address whose failures are counted together: an IPv6 network of 64 bits counts as one address."""
    found = client_ip(request)
    if isinstance(found, ipaddress.IPv6Address):
        return str(ipaddress.ip_network((found, 64), strict=False))
    return str(found)


def _credentials(request: HTTPConnection) -> tuple[str, str] | None:
    """Return name and password of a request, or None if it has none that can be read."""
    given = request.headers.get("authorization", "")
    kind, _, encoded = given.partition(" ")
    if kind.lower() != "basic" or len(encoded) > HEADER_BYTES:
        return None
    try:
        name, colon, password = b64decode(encoded.strip(), validate=True).decode().partition(":")
    except ValueError:
        return None
    return (name, password) if colon else None


def read_networks(text: str) -> list[Network]:
    """Return the networks of a list with commas. Raises ``ConfigurationError``, also for one with every address."""
    try:
        found = [ipaddress.ip_network(each.strip()) for each in text.split(",")]
    except ValueError:
        raise ConfigurationError(
            f"--trusted-proxies: {text!r} should be networks such as 10.0.0.0/8, 10.1.2.3"
        ) from None
    old = ipaddress.collapse_addresses(each for each in found if isinstance(each, ipaddress.IPv4Network))
    new = ipaddress.collapse_addresses(each for each in found if isinstance(each, ipaddress.IPv6Network))
    if any(each.prefixlen == 0 for each in (*old, *new)):
        raise ConfigurationError(f"--trusted-proxies: {text!r} would let every client name its user")
    return found
