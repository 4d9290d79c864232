"""The table ``[sinks.NAME]`` with ``type = "python"``."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, Field, field_validator

from outbox_relay.fields import FUNCTION, Count, Number, matching, rule
from outbox_relay.settings.connection_strings import Dsn, blank_is_none
from outbox_relay.sinks.settings import SinkSettings

_NO_HANDLER = 'should be "MODULE:FUNCTION", such as "shop.mail:send"'


class PythonSettings(SinkSettings):
    """A sink that calls a function of the application, the handler, in the process of the relay."""

    handler: Annotated[str, matching(FUNCTION, _NO_HANDLER)] = Field(max_length=255)
    """The function that is called with each delivery, "MODULE:FUNCTION"."""
    max_in_flight: Count = Field(default=64, ge=1, le=4096)
    """Most concurrent calls of one relay, 1 to 4096."""
    timeout_seconds: Number = Field(default=15.0, gt=0, le=3600)
    """Longest time for one call of the handler, in seconds, above 0 and at most 3600."""
    dsn: Annotated[Dsn | None, BeforeValidator(blank_is_none)] = Field(default=None, repr=False)
    """Connection string of the application's own role, for transaction."""
    transaction: Annotated[
        bool,
        rule(
            lambda value, earlier: (
                "needs dsn, the connection string of the application's own role"
                if value and earlier.get("dsn", value) is None
                else None
            )
        ),
    ] = False
    """Call the handler inside a transaction of a connection to dsn, which marks the event as handled."""

    @field_validator("cloudevents")
    @classmethod
    def _is_none(cls, value: str) -> str:
        if value != "none":
            raise ValueError("has no effect: a handler gets the event itself")
        return value
