"""Values of producer settings that librdkafka refuses, and how ``check`` names them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.command import inside

TEXT = """[sinks.events]
type = "kafka"
topic = "events"
[sinks.events.producer]
"bootstrap.servers" = "localhost"
{setting}
[routes]
"*" = ["events"]
"""
CANARY = "CANARY7"


@pytest.mark.parametrize(
    ("name", "value", "fault"),
    [
        ("linger.ms", f'"{CANARY}"', "is a value that librdkafka does not accept"),
        ("linger.ms", "1e9", "should be a number from 0 to 900000"),
        ("message.max.bytes", "1", "should be a number from 1000 to 1000000000"),
        ("socket.keepalive.enable", '"maybe"', "should be true or false"),
        ("batch.size", '"5e5"', "should be a whole number"),
        ("message.max.bytes", "inf", "should be a whole number"),
        ("default.topic.config", '"x"', "should be left out: give each setting of topics by its own name"),
        ("compression.type", f'"{CANARY}"', "is a value that librdkafka does not accept"),
    ],
)
def test_a_value_that_librdkafka_refuses_is_named_with_its_line_and_not_repeated(
    tmp_path: Path, name: str, value: str, fault: str
) -> None:
    """Goes red when only the start of a relay finds it, under the name that librdkafka has for the setting."""
    file = tmp_path / "relay.toml"
    file.write_text(TEXT.format(setting=f'"{name}" = {value}'))
    ended = inside("check", "-c", file, "--dsn", "host=127.0.0.1")
    assert (ended.code, ended.out) == (2, "")
    assert ended.err == f'{file}:6: sinks.events.producer."{name}": {fault}\n'


def test_what_is_in_the_environment_is_named_by_its_variable(tmp_path: Path) -> None:
    file = tmp_path / "relay.toml"
    file.write_text(TEXT.format(setting=""))
    ended = inside(
        "check", "-c", file, "--dsn", "host=127.0.0.1", OUTBOX_RELAY_SINKS__EVENTS__PRODUCER__LINGER_MS=CANARY
    )
    assert ended.code == 2
    assert ended.err.startswith("OUTBOX_RELAY_SINKS__EVENTS__PRODUCER__LINGER_MS: ")
    assert CANARY not in ended.err


def test_no_library_is_loaded_for_a_check(tmp_path: Path) -> None:
    """Goes red when the value of a setting that names a library is tried, which loads it: this one is missing."""
    file = tmp_path / "relay.toml"
    file.write_text(TEXT.format(setting='"plugin.library.paths" = "/missing.so"'))
    ended = inside("check", "-c", file, "--dsn", "host=127.0.0.1")
    assert (ended.code, len(ended.err.splitlines())) == (0, 1), "a warning alone"
