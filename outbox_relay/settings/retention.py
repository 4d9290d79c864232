"""The table ``[retention]``: how long events, uids and dead letters are kept."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from outbox_relay.fields import Count, Section, matching

MAX_DAYS = 36_500
"""Largest number of days that can be set, 100 years."""
_ADDRESS = matching(
    r"|/[^\x00-\x1f\x7f]*|(s3|gs)://[^\s/@?#:]+(/[^\s@?#]*)?(\?[^\s@#]*)?",
    'should be the path of a directory, such as "/var/lib/archive", or "s3://BUCKET/PREFIX" or "gs://BUCKET/PREFIX", '
    "without credentials: those come from the environment",
)


class RetentionSettings(Section):
    """Retention: days that are past are archived, if an archive is named, and emptied."""

    enabled: bool = True
    """Let the relay do passes; false leaves them to the command ``retention run``."""
    keep_days: Count = Field(default=30, ge=0, le=MAX_DAYS)
    """Days for which events are kept in the log after their day has ended, 0 to 36500; 0: indefinitely."""
    keep_uids_days: Count = Field(default=30, ge=0, le=MAX_DAYS)
    """Days for which uids that callers chose and marks of the inbox are kept, 0 to 36500; 0: indefinitely."""
    keep_dead_days: Count = Field(default=0, ge=0, le=MAX_DAYS)
    """Days after which dead letters are discarded, 0 to 36500; 0: never."""
    keep_attempts_days: Count = Field(default=14, ge=0, le=MAX_DAYS)
    """Days for which recorded attempts are kept, 0 to 36500; 0: indefinitely."""
    archive: Annotated[str, _ADDRESS] = ""
    """Address of the archive, a directory or "s3://…" or "gs://…"; empty: days are emptied without an archive."""
    archive_format: Literal["jsonl.zst", "parquet"] = "jsonl.zst"
    """Format of archived events."""

    def stated(self) -> dict[str, Any]:
        """Return the values that all relays of a database must agree on."""
        names = ("keep_days", "keep_uids_days", "keep_dead_days", "keep_attempts_days")
        return {**{name: getattr(self, name) for name in names}, "archive": bool(self.archive)}
