"""The relay with a shorter `statement_timeout` of its own, which its server enforces.

usage: python -m tests.support.short_statements MILLISECONDS [what `outbox-relay` takes]
"""

from __future__ import annotations

import sys
from collections.abc import Generator
from contextlib import contextmanager
from unittest.mock import patch

from outbox_relay import cli
from outbox_relay.postgres.session_settings import SESSION_SETTINGS


@contextmanager
def short_statements(milliseconds: int) -> Generator[None]:
    """Let the server end every statement of relays that connect inside the block after `milliseconds`."""
    with patch.dict(SESSION_SETTINGS, {"statement_timeout": f"{milliseconds}ms"}):
        yield


def main(argv: list[str]) -> int:
    """Run the command; its exit code."""
    with short_statements(int(argv[0])):
        return cli.main(argv[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
