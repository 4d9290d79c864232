"""Limits across all relays in the settings: what is accepted, and that a reload changes no session."""

from __future__ import annotations

from pathlib import Path

import pytest

from outbox_relay.domain.errors import ConfigurationError
from outbox_relay.domain.sink_limits import NO_LIMITS, SinkLimits
from outbox_relay.service.clients import build_specs
from outbox_relay.settings import Settings, load

FILE = """
[database]
dsn = "postgresql://relay@localhost/shop"
[sinks.events]
type = "kafka"
topic = "shop"
{events}
producer = {{ "bootstrap.servers" = "localhost:9092" }}
[sinks.mail]
type = "python"
handler = "shop.mail:send"
{mail}
[routes]
"*" = ["events", "mail"]
"""


def settings(directory: Path, events: str = "", mail: str = "", **environ: str) -> Settings:
    """Load a file with these settings of its two sinks."""
    path = directory / "relay.toml"
    path.write_text(FILE.format(events=events, mail=mail))
    return load(path, {f"OUTBOX_RELAY_SINKS__{name}": value for name, value in environ.items()})


def test_without_settings_there_is_no_limit(tmp_path: Path) -> None:
    assert {spec.limits for spec in build_specs(settings(tmp_path)).values()} == {NO_LIMITS}


def test_limits_are_those_of_the_file(tmp_path: Path) -> None:
    mail = "rate_per_second = 0.5\nmax_in_flight_total = 20\nspread_seconds = 300"
    specs = build_specs(settings(tmp_path, "rate_per_second = 1000", mail))
    assert specs["events"].limits == SinkLimits(1000.0)
    assert specs["mail"].limits == SinkLimits(0.5, 20, 300.0)
    found = settings(tmp_path, MAIL__RATE_PER_SECOND="7").sinks["mail"]
    assert found.rate_per_second == 7


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("rate_per_second = -1", "rate_per_second: should be greater than or equal to 0"),
        ("rate_per_second = 0.001", "rate_per_second: should be 0, for no limit, or at least 0.01"),
        ("rate_per_second = 100001", "rate_per_second: should be less than or equal to 100000"),
        ("rate_per_second = inf", "rate_per_second: should be a finite number"),
        ("rate_per_second = true", "rate_per_second: should be a number"),
        ("max_in_flight_total = 1.5", "max_in_flight_total: should be a valid integer"),
        ("max_in_flight_total = -1", "max_in_flight_total: should be greater than or equal to 0"),
        ("max_in_flight_total = 100001", "max_in_flight_total: should be less than or equal to 100000"),
        ("spread_seconds = 86401", "spread_seconds: should be less than or equal to 86400"),
        ('spread_seconds = "an hour"', "spread_seconds: should be a valid number"),
        ("rate_per_seconds = 1", "did you mean rate_per_second?"),
    ],
)
def test_wrong_values_are_refused_at_their_place(tmp_path: Path, line: str, said: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        settings(tmp_path, mail=line)
    assert said in str(refused.value)
    assert "relay.toml:12" in str(refused.value)


def test_kafka_has_no_requests_to_count(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError) as refused:
        settings(tmp_path, "max_in_flight_total = 5")
    assert str(refused.value).endswith(
        "sinks.events.max_in_flight_total: has no meaning for Kafka, whose events are sent in batches: "
        "limit rate_per_second"
    )
