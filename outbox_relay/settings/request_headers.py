"""Headers that a webhook's settings add to its requests: which names may be taken, and where values come from."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from pydantic import Field, SecretStr, model_validator

from outbox_relay.domain.errors import Misconfigured
from outbox_relay.settings import raw
from outbox_relay.settings.fields import Section
from outbox_relay.settings.problems import Problem

HEADERS = 32
"""Headers of the settings, and of the event, in one request, at most."""
NAME_CHARS = 128
"""Longest name of such a header, in characters."""
VALUE_BYTES = 4096
"""Longest value, in bytes."""
TOTAL_BYTES = 16 * 1024
"""Names and values of the settings' headers together, in bytes, at most."""

_TOKEN = re.compile(rf"[!#$%&'*+\-.^_`|~0-9A-Za-z]{{1,{NAME_CHARS}}}")
_VISIBLE = re.compile(r"[!-~](?:[ -~]*[!-~])?")
_TAKEN = frozenset(
    (
        *("accept", "accept-encoding", "connection", "cookie", "expect", "host", "idempotency-key", "keep-alive"),
        *("te", "traceparent", "trailer", "transfer-encoding", "upgrade", "user-agent"),
    )
)
_TAKEN_PREFIXES = ("webhook-", "outbox-", "content-", "proxy-", "ce-", "x-amz-", "x-goog-", "x-envoy-", "x-forwarded-")
_FORMS = 'should be text, or a table { env = "NAME" } or { file = "PATH" }'


def name_refusal(name: str) -> str | None:
    """What is wrong with ``name`` as that of a header which the relay does not send by itself; nothing when right."""
    if not _TOKEN.fullmatch(name):
        return f"should be the name of a header: 1 to {NAME_CHARS} letters, digits and hyphens"
    if name.lower() in _TAKEN or name.lower().startswith(_TAKEN_PREFIXES):
        return "is a header that the relay or the connection sets itself"
    return None


class HeaderValue(Section):
    """The value of a header: in the file text, or a table that says where the value is read."""

    text: SecretStr | None = Field(default=None, repr=False)
    """The value itself."""
    env: str | None = Field(default=None, repr=False, min_length=1)
    """The variable of the environment that holds it."""
    file: Path | None = Field(default=None, repr=False)
    """The file that holds it; a line break at its end is none of it."""

    @model_validator(mode="before")
    @classmethod
    def _one_form(cls, value: object) -> object:
        if isinstance(value, HeaderValue):
            return value
        if isinstance(value, str):
            if fault := _value_fault(value):
                raise ValueError(fault)
            return {"text": SecretStr(value)}
        table = raw.table(value)
        if table is None or table.keys() not in ({"env"}, {"file"}) or not isinstance(next(iter(table.values())), str):
            raise ValueError(_FORMS)
        return table

    def read(self, environ: Mapping[str, str]) -> str:
        """The value. Blocks for as long as reading a small file takes.

        Raises ValueError, with the source and without the value, when there is none or it cannot be a header's.
        """
        if self.text is not None:
            return self.text.get_secret_value()
        found = self._from_file(self.file) if self.file is not None else environ.get(self.env or "")
        if found is None:
            raise ValueError(f"the variable {self.env} is not set")
        if fault := _value_fault(found):
            raise ValueError(f"{f'the variable {self.env}' if self.env else self.file} {fault}")
        return found

    @staticmethod
    def _from_file(path: Path) -> str:
        try:
            with path.open("rb") as file:
                content = file.read(VALUE_BYTES + 3)
        except OSError as error:
            raise ValueError(f"{path}: {error.strerror}") from None
        return content.removesuffix(b"\n").removesuffix(b"\r").decode("latin-1")


def _value_fault(value: str) -> str | None:
    if len(value) > VALUE_BYTES:
        return f"holds more than {VALUE_BYTES} bytes"
    if not _VISIBLE.fullmatch(value):
        return "should hold visible ASCII characters, with spaces only between them"
    return None


def header_problems(headers: Mapping[str, HeaderValue], forwarded: Iterable[str]) -> list[Problem]:
    """What is wrong with the names of ``headers``; ``forwarded`` are taken by headers of the events."""
    found = [Problem((name,), fault) for name in headers if (fault := name_refusal(name)) is not None]
    if len(headers) > HEADERS:
        found.append(Problem((), f"holds {len(headers)} headers, should hold at most {HEADERS}"))
    taken = dict.fromkeys(forwarded, "is in forward_headers too: take it out of one of the two")
    for name in headers:
        if name.lower() in taken:
            found.append(Problem((name,), taken[name.lower()]))
        taken[name.lower()] = "stands twice: upper and lower case are alike in names of headers"
    return found


def read_file(setting: str, path: Path) -> str:
    """A header's value from the file that ``setting`` names; a line break at its end is none of it.

    Raises Misconfigured, with both names and without the value, when it cannot be read or cannot be a header's.
    """
    try:
        return HeaderValue.model_validate({"file": str(path)}).read({})
    except ValueError as error:
        raise Misconfigured(f"{setting} {error}") from None


def read_headers(headers: Mapping[str, HeaderValue], environ: Mapping[str, str]) -> dict[str, str]:
    """The values of ``headers`` by their names in lower case.

    Raises Misconfigured, with the names and sources and without any value, when one cannot be read, or all together are
    too long.
    """
    found: dict[str, str] = {}
    faults: list[str] = []
    for name, value in headers.items():
        try:
            found[name.lower()] = value.read(environ)
        except ValueError as error:
            faults.append(f"headers.{name}: {error}")
    total = sum(len(name) + len(value) for name, value in found.items())
    if total > TOTAL_BYTES:
        faults.append(f"headers: names and values hold {total} bytes together, should hold at most {TOTAL_BYTES}")
    if faults:
        raise Misconfigured("; ".join(faults))
    return found
