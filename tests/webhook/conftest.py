"""Fixtures of the webhook's cases."""

from __future__ import annotations

import socket
from collections.abc import Generator

import pytest

from tests.support.names import Names
from tests.support.receiver.certificates import Authority


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """Return the tests' own certificate authority."""
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Generator[Names]:
    """Yield names under `.test` that resolve to what the test says."""
    names = Names(socket.getaddrinfo)
    monkeypatch.setattr(socket, "getaddrinfo", names)
    yield names
    names.release()
