"""Headers that a webhook's settings add to its requests: their names, and where their values come from."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, TypeAlias

from pydantic import AfterValidator, Field, SecretStr, model_validator

from outbox_relay.domain.errors import Misconfigured
from outbox_relay.settings.fields import Section, as_table, read_small_file
from outbox_relay.settings.problems import Problem

HEADERS = 32
"""Most headers of the settings, and of the event, in one request."""
VALUE_BYTES = 4096
"""Longest value, in bytes."""
TOTAL_BYTES = 16 * 1024
"""Most bytes of all names and values of the settings' headers."""
HEADER_NAME = r"[!#$%&'*+\-.^_`|~0-9A-Za-z]{1,128}"
NOT_A_NAME = "should be the name of a header: 1 to 128 letters, digits and hyphens"

_RESERVED = re.compile(
    r"accept(-encoding)?|connection|cookie|expect|host|idempotency-key|keep-alive|te|traceparent|trailer|upgrade|"
    r"transfer-encoding|user-agent|(webhook|outbox|content|proxy|ce|x-amz|x-goog|x-envoy|x-forwarded)-.*"
)


def further_header(name: str) -> str:
    """Return ``name`` if it can be the name of a further header. Raises ValueError otherwise."""
    if not re.fullmatch(HEADER_NAME, name):
        raise ValueError(NOT_A_NAME)
    if _RESERVED.fullmatch(name.lower()):
        raise ValueError("is a header that the relay or the connection sets itself")
    return name


class HeaderValue(Section):
    """The value of a header: in the file text, or a table that names its source."""

    text: SecretStr | None = Field(default=None, repr=False)
    """The value itself."""
    env: str | None = Field(default=None, repr=False, min_length=1)
    """The environment variable that holds it."""
    file: Path | None = Field(default=None, repr=False)
    """The file that holds it, with or without a line break at its end."""

    @model_validator(mode="before")
    @classmethod
    def _one_form(cls, value: object) -> object:
        if isinstance(value, HeaderValue):
            return value
        if isinstance(value, str):
            return {"text": SecretStr(_checked(value))}
        source = as_table(value)
        if source.keys() not in ({"env"}, {"file"}) or not all(isinstance(name, str) for name in source.values()):
            raise ValueError('should be text, or a table { env = "NAME" } or { file = "PATH" }')
        return source

    def read(self, environ: Mapping[str, str]) -> str:
        """Return the value. Blocks while a small file is read.

        Raises ValueError, with the source and without the value, if there is none or a header cannot hold it.
        """
        if self.text is not None:
            return self.text.get_secret_value()
        try:
            if self.file is not None:
                return _checked(read_small_file(self.file).removesuffix("\n").removesuffix("\r"))
            return _checked(environ[self.env or ""])
        except KeyError:
            raise ValueError(f"the variable {self.env} is not set") from None
        except ValueError as error:
            raise ValueError(f"{self.file or f'the variable {self.env}'}: {error}") from None


def _checked(value: str) -> str:
    if len(value) > VALUE_BYTES:
        raise ValueError(f"holds more than {VALUE_BYTES} bytes")
    if not re.fullmatch(r"[!-~](?:[ -~]*[!-~])?", value):
        raise ValueError("should hold visible ASCII characters, with spaces only between them")
    return value


Headers: TypeAlias = dict[Annotated[str, AfterValidator(further_header)], HeaderValue]


def repeated_headers(headers: Headers, forwarded: Iterable[str]) -> Iterator[Problem]:
    """Yield the names in ``headers`` that appear twice, or among those ``forwarded`` from the events."""
    taken = dict.fromkeys(forwarded, "is in forward_headers too: remove it from one of the two")
    for name in headers:
        if name.lower() in taken:
            yield Problem((name,), taken[name.lower()])
        taken[name.lower()] = "appears twice: header names ignore case"


def read_headers(headers: Headers, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the values of ``headers`` by their names in lower case.

    Raises Misconfigured, with the names and sources and without any value, if one cannot be read or all together are
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
