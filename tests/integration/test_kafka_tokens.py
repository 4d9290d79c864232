"""Tokens of SASL OAUTHBEARER from a function of the application, as for AWS MSK with IAM."""

import os
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from outbox_relay import outbox
from tests.support.command import inside
from tests.support.database import Database
from tests.support.kafka.secured import SecuredBroker
from tests.support.service import RelayService
from tests.support.wait import until

pytestmark = [pytest.mark.slow]

CONFIG = """
[database]
dsn = "{dsn}"
[sinks.events]
type = "kafka"
topic = "{topic}"
token_provider = "tokens_for_tests:relay_token"
circuit = {{ probe_seconds = 0.2, probe_max_seconds = 1 }}
[sinks.events.producer]
"bootstrap.servers" = "{bootstrap}"
"security.protocol" = "SASL_PLAINTEXT"
"sasl.mechanism" = "OAUTHBEARER"
[routes]
"*" = ["events"]
"""
# The broker takes tokens without a signature; the list of calls is the only thing that no application has.
PROVIDER = """
import base64, json, time
from pathlib import Path

HERE = Path(__file__).parent

def encoded(part):
    return base64.urlsafe_b64encode(json.dumps(part).encode()).rstrip(b"=").decode()

def relay_token():
    with (HERE / "calls").open("a") as calls:
        calls.write("call\\n")
    if not (HERE / "credentials").exists():
        raise RuntimeError("no credentials for tests")
    now = time.time()
    token = encoded({"alg": "none"}) + "." + encoded({"sub": "relay", "iat": now, "exp": now + 3600}) + "."
    return token, 5
"""


@pytest.fixture
def secured() -> Generator[SecuredBroker]:
    """Start a broker where the user relay may write to topics that begin with `open.`."""
    broker = SecuredBroker()
    if not broker.real:
        broker.close()
        pytest.skip("needs Apache Kafka; the substitute knows no users")
    with broker:
        broker.administration.allow("relay", "WRITE", topic="open.")
        yield broker


def emit(database: Database, number: int) -> None:
    with psycopg.connect(database.dsn) as connection:
        outbox.emit(connection, "made", {"n": number}, key="k")


def status(relay: RelayService) -> dict[str, Any]:
    """Return the sink's part of `status --json`."""
    return inside("status", "--json", "-c", relay.config).json["sinks"]["events"]


def test_a_function_provides_tokens_and_its_failure_is_the_reason(
    database: Database, secured: SecuredBroker, topic: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tokens_for_tests.py").write_text(PROVIDER)
    monkeypatch.setattr("sys.path", [str(tmp_path), *sys.path])
    secured.administration.create_topic(f"open.{topic}", 1)
    text = CONFIG.format(dsn=database.dsn, topic=f"open.{topic}", bootstrap=secured.address("OAUTH"))
    path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    with RelayService(tmp_path, text, PYTHONPATH=path) as relay:
        emit(database, 1)
        said = "RuntimeError: no credentials for tests"
        until(lambda: said in (status(relay)["last_error"] or ""), seconds=60, what="status has the function's reason")
        ended = inside("check", "--online", "-c", relay.config)
        assert ended.code == 2
        assert f'token_provider "tokens_for_tests:relay_token": {said}' in ended.err
        (tmp_path / "credentials").touch()
        until(lambda: len(secured.read_all(f"open.{topic}")) == 1, seconds=60, what="the event arrives")
        ended = inside("check", "--online", "-c", relay.config)
        assert (ended.code, ended.err) == (0, "")
        # A token of the running relay lasts five seconds.
        before = len((tmp_path / "calls").read_text().splitlines())
        until(
            lambda: len((tmp_path / "calls").read_text().splitlines()) > before, seconds=60, what="a token is renewed"
        )
        emit(database, 2)
        until(lambda: len(secured.read_all(f"open.{topic}")) == 2, seconds=60, what="the next event arrives")
        assert status(relay)["dead"] == 0
        assert relay.stop() == 0


def test_a_function_that_is_missing_is_named(tmp_path: Path) -> None:
    file = tmp_path / "relay.toml"
    file.write_text(
        CONFIG.format(dsn="host=127.0.0.1", topic="t", bootstrap="127.0.0.1:1").replace("tokens_for_tests", "none")
    )
    ended = inside("check", "-c", file)
    assert ended.code == 2
    assert 'sinks.events.token_provider "none:relay_token": ModuleNotFoundError' in ended.err
