"""Cursors that refuse to end or begin the transaction of a delivery, however the statement is passed to them.

This is against mistakes. A handler that calls libpq itself, or brings cursors of its own, can end its transaction.
"""

from __future__ import annotations

import re
from typing import Any, cast

import psycopg
from psycopg import sql

from outbox_relay.worker.answers import HandlerMistake

CONTROL = "a handler must not end or begin the transaction of delivery.connection: the worker commits when it returns"
_CONTROL = re.compile(
    r"(?:commit|end|abort|begin|rollback(?!\s+(?:work\s+|transaction\s+)?to\b)|(?:start|prepare)\s+transaction)\b",
    re.IGNORECASE,
)
_BODY = re.compile(r"\s*create\b.*\bbegin\s+atomic\b", re.IGNORECASE | re.DOTALL)
"""The beginning of a function in SQL, whose statements end with ``end``."""
_SPACE = re.compile(r"(?:\s+|--[^\n]*)+")
_COMMENT = re.compile(r"/\*|\*/")
_PLAIN = re.compile(r"""[^;'"$/-]+""")
_LITERALS = {
    "'": re.compile(r"'(?:[^']|'')*"),
    '"': re.compile(r'"(?:[^"]|"")*'),
    "-": re.compile(r"--[^\n]*|-"),
}
_ESCAPED = re.compile(r"'(?:[^'\\]|\\.|'')*", re.DOTALL)
_TAG = re.compile(r"\$(?:[^\W\d]\w*)?\$")


class TransactionEnded(HandlerMistake, psycopg.ProgrammingError):
    """A handler ended its transaction, or left it failed."""


def check_statement(query: object, connection: Any) -> None:
    """Raise ``TransactionEnded`` for a script with a statement that ends or begins a transaction."""
    if isinstance(query, sql.Composable):
        query = query.as_string(connection)
    parts: Any = getattr(query, "strings", None)  # of a template string
    if isinstance(parts, tuple):
        query = "?".join(cast("tuple[str, ...]", parts))
    text = query.decode(errors="replace") if isinstance(query, bytes) else str(query)
    if _ends_transaction(text):
        raise TransactionEnded(CONTROL)


def _ends_transaction(text: str) -> bool:
    at, in_body = 0, False
    while at < len(text):
        start = _past_space(text, at)
        if _CONTROL.match(text, start):
            if not in_body:
                return True
            in_body = False
        if ";" not in text:
            return False
        at = _end_of_statement(text, start)
        in_body = in_body or _BODY.match(text, start, at) is not None
        at += 1
    return False


def _past_space(text: str, at: int) -> int:
    while True:
        if found := _SPACE.match(text, at):
            at = found.end()
        elif text.startswith("/*", at):
            at = _past_comment(text, at)
        else:
            return at


def _past_comment(text: str, at: int) -> int:
    """Return where a comment ends, which may contain others."""
    depth = 0
    for found in _COMMENT.finditer(text, at):
        depth += 1 if found[0] == "/*" else -1
        if not depth:
            return found.end()
    return len(text)


def _end_of_statement(text: str, at: int) -> int:
    """Return where the next semicolon is that no literal, name or comment contains."""
    while at < len(text) and text[at] != ";":
        at = _past_part(text, at)
    return at


def _past_part(text: str, at: int) -> int:
    if found := _PLAIN.match(text, at):
        return found.end()
    before = text[max(0, at - 2) : at].lower()
    match text[at]:
        case "/":
            return _past_comment(text, at) if text.startswith("/*", at) else at + 1
        case "$":
            tag = None if before[-1:].isalnum() or before[-1:] == "_" else _TAG.match(text, at)
            end = -1 if tag is None else text.find(tag[0], tag.end())
            return at + 1 if tag is None else len(text) if end < 0 else end + len(tag[0])
        case "'" if before.endswith("e") and not before[:-1].isalnum():
            pattern = _ESCAPED
        case other:
            pattern = _LITERALS[other]
    found = pattern.match(text, at)
    return at + 1 if found is None else max(at + 1, found.end() + (text[at] != "-"))


class GuardedCursor(psycopg.Cursor[Any]):
    """A cursor that refuses to end the transaction."""

    def execute(self, query: Any, *args: Any, **kwargs: Any) -> Any:
        """Execute statements that do not end the transaction."""
        check_statement(query, self.connection)
        return super().execute(query, *args, **kwargs)

    def executemany(self, query: Any, *args: Any, **kwargs: Any) -> None:
        """Execute a statement that does not end the transaction."""
        check_statement(query, self.connection)
        super().executemany(query, *args, **kwargs)

    def stream(self, query: Any, *args: Any, **kwargs: Any) -> Any:
        """Return rows of a statement that does not end the transaction."""
        check_statement(query, self.connection)
        return super().stream(query, *args, **kwargs)

    def copy(self, statement: Any, *args: Any, **kwargs: Any) -> Any:
        """Begin a COPY."""
        check_statement(statement, self.connection)
        return super().copy(statement, *args, **kwargs)


class AsyncGuardedCursor(psycopg.AsyncCursor[Any]):
    """An asynchronous cursor that refuses to end the transaction."""

    async def execute(self, query: Any, *args: Any, **kwargs: Any) -> Any:
        """Execute statements that do not end the transaction."""
        check_statement(query, self.connection)
        return await super().execute(query, *args, **kwargs)

    async def executemany(self, query: Any, *args: Any, **kwargs: Any) -> None:
        """Execute a statement that does not end the transaction."""
        check_statement(query, self.connection)
        await super().executemany(query, *args, **kwargs)

    def stream(self, query: Any, *args: Any, **kwargs: Any) -> Any:
        """Return rows of a statement that does not end the transaction."""
        check_statement(query, self.connection)
        return super().stream(query, *args, **kwargs)

    def copy(self, statement: Any, *args: Any, **kwargs: Any) -> Any:
        """Begin a COPY."""
        check_statement(statement, self.connection)
        return super().copy(statement, *args, **kwargs)
