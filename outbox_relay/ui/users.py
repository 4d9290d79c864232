"""Users of the page, tokens of its API, and the files that name them.

A line of the users' file is ``NAME:ROLE:HASH``, a line of the tokens' file ``ROLE:TOKEN``. Empty lines and lines that
begin with ``#`` are skipped.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Generic, Literal, TypeAlias, TypeVar

from outbox_relay.domain.errors import ConfigurationError
from outbox_relay.domain.files import read_file

T = TypeVar("T")
Role: TypeAlias = Literal["viewer", "operator"]
ROLES: Final[tuple[Role, ...]] = ("viewer", "operator")
FILE_BYTES: Final = 1 << 20
"""Maximum size of a file of users or tokens."""
TOKEN_CHARS: Final = 20
"""Least length of a token. A shorter one could be guessed."""
PASSWORD_BYTES: Final = 1024
"""Maximum length of a password in UTF-8."""
COST, BLOCK, PARALLEL = 1 << 14, 8, 5
"""The parameters of scrypt for new hashes, as OWASP recommends them for 16 MiB of memory."""
COST_MOST, BLOCK_MOST, PARALLEL_MOST = 1 << 17, 16, 16
"""Largest parameters of a hash that is accepted: 256 MiB."""
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@+-]{0,63}")


@dataclass(frozen=True, slots=True)
class User:
    """A person or a program that uses the page. An operator may act, a viewer may look."""

    name: str
    role: Role


@dataclass(frozen=True, slots=True)
class UserEntry:
    """A line of the users' file. ``hash`` is empty if the user comes through a proxy only."""

    user: User
    hash: str


def valid_name(name: str) -> bool:
    """Return True if ``name`` is valid in the users' file."""
    return _NAME.fullmatch(name) is not None


def hash_password(password: str) -> str:
    """Return a salted scrypt hash of ``password``, for the users' file.

    Raises ``ConfigurationError`` if it is empty or too long.
    """
    if not 0 < len(password.encode()) <= PASSWORD_BYTES:
        raise ConfigurationError(f"a password has 1 to {PASSWORD_BYTES} bytes")
    salt = os.urandom(16)
    found = _scrypt(password, salt, COST, BLOCK, PARALLEL)
    return f"scrypt${COST}${BLOCK}${PARALLEL}${b64encode(salt).decode()}${b64encode(found).decode()}"


def verify_password(password: str, stored: str) -> bool:
    """Return True if ``password`` has the hash ``stored``. Takes a fraction of a second of a processor."""
    cost, block, parallel, salt, expected = _parts(stored)
    if len(password.encode(errors="surrogatepass")) > PASSWORD_BYTES:
        return False
    return hmac.compare_digest(_scrypt(password, salt, cost, block, parallel), expected)


def _scrypt(password: str, salt: bytes, cost: int, block: int, parallel: int) -> bytes:
    memory = 256 * cost * block + (1 << 20)
    secret = password.encode(errors="surrogatepass")
    return hashlib.scrypt(secret, salt=salt, n=cost, r=block, p=parallel, maxmem=memory, dklen=32)


def _parts(stored: str) -> tuple[int, int, int, bytes, bytes]:
    """Return the parts of a hash. Raises ValueError if it is none that ``hash_password`` could have made."""
    kind, cost, block, parallel, salt, expected = stored.split("$")
    numbers = int(cost), int(block), int(parallel)
    within = all(0 < n <= most for n, most in zip(numbers, (COST_MOST, BLOCK_MOST, PARALLEL_MOST), strict=True))
    if kind != "scrypt" or not within or numbers[0] & (numbers[0] - 1) or numbers[0] < 2:
        raise ValueError(stored)
    return *numbers, b64decode(salt, validate=True), b64decode(expected, validate=True)


def read_users(path: Path) -> dict[str, UserEntry]:
    """Return the accounts of a file by name. Raises ``ConfigurationError``, which names the line and no hash."""
    found: dict[str, UserEntry] = {}
    for number, line in _lines(path):
        name, _, rest = line.partition(":")
        role, _, stored = rest.partition(":")
        if not valid_name(name) or name in found:
            raise ConfigurationError(f"{path}, line {number}: the name is not valid, or is used twice")
        found[name] = UserEntry(User(name, _role(path, number, role)), stored)
        if stored and not _is_hash(stored):
            raise ConfigurationError(f"{path}, line {number}: the hash of {name} is none that ui-user has printed")
    if not found:
        raise ConfigurationError(f"{path}: no user is in it; add a line with outbox-relay ui-user NAME ROLE")
    return found


def _is_hash(stored: str) -> bool:
    try:
        _parts(stored)
    except ValueError:
        return False
    return True


def read_tokens(path: Path) -> dict[bytes, User]:
    """Return the users of the API by the SHA-256 of their token. They are named after the line of their token.

    Raises ``ConfigurationError``, which names the line and no token.
    """
    found: dict[bytes, User] = {}
    for number, line in _lines(path):
        role, _, token = line.partition(":")
        user = User(f"token-{number}", _role(path, number, role))
        if len(token) < TOKEN_CHARS or not token.isascii() or any(c.isspace() for c in token):
            raise ConfigurationError(
                f"{path}, line {number}: a token has at least {TOKEN_CHARS} ASCII characters and no space"
            )
        if token_digest(token) in found:
            raise ConfigurationError(f"{path}, line {number}: the token is used twice")
        found[token_digest(token)] = user
    if not found:
        raise ConfigurationError(f"{path}: no token is in it; a line is ROLE:TOKEN")
    return found


def token_digest(token: str) -> bytes:
    """Return the SHA-256 of a token, by which it is looked up: a comparison reveals nothing of the token."""
    return hashlib.sha256(token.encode(errors="surrogatepass")).digest()


def _role(path: Path, number: int, role: str) -> Role:
    if role not in ROLES:
        raise ConfigurationError(f"{path}, line {number}: the role is viewer or operator")
    return role


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    try:
        found = read_file(path, FILE_BYTES)
    except OSError as error:
        raise ConfigurationError(f"{path}: {error.strerror or error}") from None
    if len(found) > FILE_BYTES:
        raise ConfigurationError(f"{path}: is larger than {FILE_BYTES:,} bytes")
    try:
        text = found.decode()
    except UnicodeDecodeError:
        raise ConfigurationError(f"{path}: is not UTF-8") from None
    for number, line in enumerate(text.splitlines(), 1):
        if (entry := line.strip()) and not entry.startswith("#"):
            yield number, entry


class FileContent(Generic[T]):
    """The content of a file, read again when the file has changed. A change that cannot be read is an error."""

    def __init__(self, path: Path, read: Callable[[Path], T]) -> None:
        self._path = path
        self._read = read
        self._version: tuple[int, int, int] | None = None
        self._content: T | None = None

    def current(self) -> T:
        """Return the content. Raises ``ConfigurationError``; may block."""
        try:
            found = self._path.stat()
        except OSError as error:
            raise ConfigurationError(f"{self._path}: {error.strerror or error}") from None
        version = found.st_mtime_ns, found.st_size, found.st_ino
        if version != self._version or self._content is None:
            self._content = self._read(self._path)
            self._version = version
        return self._content
