"""Programs that some tests need and no wheel brings: absent they are skipped, and in CI that is an error."""

import os
from typing import NoReturn

import pytest


def absent(what: str, *packages: str) -> NoReturn:
    """Skip the test because ``what`` is missing, or fail it if the environment variable CI is "true"."""
    missing(f"no {what}: apt-get install {' '.join(packages)}")


def missing(reason: str) -> NoReturn:
    """Skip the test with the reason, or fail when the environment variable CI is "true"."""
    if os.environ.get("CI") == "true":
        raise RuntimeError(reason)
    pytest.skip(reason)
