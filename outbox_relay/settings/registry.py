"""The table ``[sinks.NAME.registry]`` of a Kafka sink."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, SecretStr, ValidationInfo, field_validator

from outbox_relay.fields import Number, Section, excludes, matching, needs

_RECORD = matching(
    r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*",
    "should be the full name of a record or message, such as com.example.OrderPlaced",
)


def _addresses(value: str) -> str:
    """Return ``value`` if it is empty or holds addresses. Raise ValueError, without it, otherwise."""
    for url in value.split(",") if value else ():
        try:
            parts = urlsplit(url.strip())
            usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:
            usable = False
        else:
            if parts.username is not None or parts.password is not None:
                raise ValueError("should hold no credentials: set username, and password or password_file")
            usable = usable and not parts.query and not parts.fragment
        if not usable:
            raise ValueError('should be the address of a registry, such as "https://registry.internal:8081"')
    return value


class RegistrySettings(Section):
    """The schema registry of a Kafka sink, whose records then have Confluent's wire format."""

    url: Annotated[str, AfterValidator(_addresses)] = Field(default="", repr=False)
    """Address of the registry, or several with commas between them; empty: payloads are sent as they are."""
    format: Literal["avro", "json", "protobuf"] | None = Field(default=None, validate_default=True)
    """Format of records: "avro", "json" for JSON Schema, or "protobuf"; required with url."""
    subject_name_strategy: Literal["topic", "record", "topic-record"] = "topic"
    """Subjects: TOPIC-value ("topic"), the record's name ("record"), or TOPIC-RECORD ("topic-record")."""
    records: dict[str, Annotated[str, _RECORD]] = Field(default_factory=dict, max_length=1000)
    """Full names of records or messages by event type; by default the type itself, or a file's first message."""
    auto_register: bool = False
    """Register the schemas in schema_files; otherwise they must be registered already."""
    schema_files: dict[str, Path] = Field(default_factory=dict, max_length=1000, validate_default=True)
    """Files with schemas by event type, for Avro and JSON Schema; of other types the latest version counts."""
    username: str | None = Field(default=None, min_length=1)
    """User name for basic authentication."""
    password: Annotated[SecretStr | None, needs("username")] = None
    """Password for basic authentication."""
    password_file: Annotated[Path | None, needs("username"), excludes("password")] = None
    """A file with that password, instead of password; read whenever the registry is asked."""
    ca_file: Path | None = None
    """A PEM file with the authorities that the registry is verified by, instead of the usual ones."""
    client_certificate: Path | None = None
    """A PEM file with the certificate that the relay presents to the registry."""
    client_key: Annotated[Path | None, needs("client_certificate")] = None
    """A PEM file with the key of client_certificate, not encrypted; by default in the same file."""
    timeout_seconds: Number = Field(default=3.0, gt=0, le=60)
    """Longest time for one operation of a connection to the registry, in seconds, above 0 and at most 60."""
    cache_seconds: Number = Field(default=300.0, ge=1, le=86_400)
    """Time after which the latest version of a subject is asked for again, in seconds, 1 to 86400."""
    missing_seconds: Number = Field(default=600.0, ge=0, le=604_800)
    """Time for which events wait for a schema that is missing or unusable before they are dead, 0 to 604800."""

    @field_validator("format")
    @classmethod
    def _belongs_to_a_registry(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is not None and info.data.get("url") == "":
            raise ValueError("needs url, the address of the registry")
        if value is None and info.data.get("url"):
            raise ValueError('is required with url: "avro", "json" or "protobuf"')
        return value

    @field_validator("schema_files")
    @classmethod
    def _has_text(cls, value: dict[str, Path], info: ValidationInfo) -> dict[str, Path]:
        if value and info.data.get("format") == "protobuf":
            raise ValueError('is for "avro" and "json": register the schemas of Protobuf with your build')
        if info.data.get("auto_register") and not value:
            raise ValueError("is required with auto_register = true")
        return value

    @field_validator("username")
    @classmethod
    def _has_no_colon(cls, value: str | None) -> str | None:
        if value is not None and ":" in value:
            raise ValueError("should not contain a colon: basic authentication ends the name there")
        return value
