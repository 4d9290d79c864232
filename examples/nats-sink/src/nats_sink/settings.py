"""The table `[sinks.NAME]` with `type = "nats"`."""

from typing import Annotated
from urllib.parse import urlsplit

from pydantic import Field, SecretStr, field_validator

from outbox_relay.sinks import SHOWN, PluginSettings


class NatsSettings(PluginSettings):
    """A sink that publishes to a stream."""

    server: Annotated[str, SHOWN] = "nats://localhost:4222"
    """The server, "nats://HOST:PORT" or "tls://HOST:PORT"."""
    stream: Annotated[str, SHOWN] = Field(min_length=1, max_length=255, pattern=r"^[^\s.*>/\\]+$")
    """The stream that must take the messages. It is not created."""
    subject: Annotated[str, SHOWN] = Field(default="{type}", min_length=1, max_length=255)
    """The subject of a message, with {type} for the type of the event."""
    user: str | None = None
    """The user to log in as."""
    password: SecretStr | None = None
    """The password of user."""
    max_in_flight: int = Field(default=64, ge=1, le=4096)
    """Most messages without an acknowledgement, 1 to 4096."""

    @field_validator("server")
    @classmethod
    def _is_address(cls, value: str) -> str:
        parts = urlsplit(value)
        if parts.scheme not in ("nats", "tls") or not parts.hostname or parts.path:
            raise ValueError('should be "nats://HOST:PORT" or "tls://HOST:PORT"')
        if parts.username is not None:
            raise ValueError("should be without user and password, which have settings of their own")
        return value

    @field_validator("subject")
    @classmethod
    def _has_known_fields(cls, value: str) -> str:
        if any(char in value.replace("{type}", "") for char in "{}*> \t\r\n"):
            raise ValueError("should be a subject without wildcards, in which {type} is the only field")
        return value
