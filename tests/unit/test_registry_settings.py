"""The table of a schema registry: refused with the fix and without a secret; a sink without one pays nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from outbox_relay.domain.errors import ConfigurationError
from outbox_relay.service.check import unusable_plugins
from outbox_relay.service.kafka import kafka_sink
from outbox_relay.settings import KafkaSettings, load
from tests.support.settings_file import load_text

CANARY = "hunter2canary"
FILE = """
[database]
dsn = "postgresql://relay@localhost/shop"
[sinks.events]
type = "kafka"
topic = "shop"
producer = {{ "bootstrap.servers" = "localhost:9092" }}
{more}
[sinks.events.registry]
{registry}
[routes]
"*" = ["events"]
"""
URL = 'url = "https://registry.internal:8081"'
AVRO = f'{URL}\nformat = "avro"'
PROTOBUF = f'{URL}\nformat = "protobuf"'

REFUSED = [
    (URL, "format: is required with url"),
    ('format = "avro"', "format: needs url"),
    ('url = "registry.internal:8081"', "url: should be the address of a registry"),
    ('url = "https://a.internal,,https://b.internal"', "url: should be the address of a registry"),
    ('url = "https://a.internal/?token=hunter2canary"', "url: should be the address of a registry"),
    ('url = "https://u:hunter2canary@a.internal"', "url: should hold no credentials: set username"),
    (f'{AVRO}\npassword = "hunter2canary"', "password: needs username"),
    (f'{AVRO}\nusername = "u"\npassword = "hunter2canary"\npassword_file = "/x"', "password_file: "),
    (f'{AVRO}\nusername = "a:b"', "username: should not contain a colon"),
    (f'{AVRO}\nclient_key = "/x"', "client_key: needs client_certificate"),
    (f"{AVRO}\nauto_register = true", "schema_files: is required with auto_register = true"),
    (f'{PROTOBUF}\nschema_files = {{ a = "/x" }}', 'schema_files: is for "avro" and "json"'),
    (f'{AVRO}\nrecords = {{ a = "not a name" }}', "should be the full name of a record"),
    (f"{AVRO}\ntimeout_seconds = 0", "timeout_seconds: "),
    (f"{AVRO}\ncache_seconds = 0", "cache_seconds: "),
    (f'{AVRO}\nsubject_name_strategy = "topics"', "subject_name_strategy: "),
]


def text(registry: str, more: str = "") -> str:
    return FILE.format(registry=registry, more=more)


@pytest.mark.parametrize(("registry", "reason"), REFUSED)
def test_wrong_table_is_refused_at_its_place_without_secrets(tmp_path: Path, registry: str, reason: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        load_text(tmp_path, text(registry))
    assert f"sinks.events.registry.{reason}" in str(refused.value) or reason in str(refused.value)
    assert "sinks.events.registry" in str(refused.value)
    assert CANARY not in str(refused.value)


def test_structured_events_of_cloudevents_have_no_schema(tmp_path: Path) -> None:
    more = 'cloudevents = "{}"\ncloudevents_source = "/shop"'
    with pytest.raises(ConfigurationError, match='registry: excludes cloudevents = "structured"'):
        load_text(tmp_path, text(AVRO, more.format("structured")))
    load_text(tmp_path, text(AVRO, more.format("binary")))


def test_password_and_addresses_are_in_no_text_of_the_settings(tmp_path: Path) -> None:
    settings = load_text(tmp_path, text(f'{AVRO}\nusername = "u"\npassword = "{CANARY}"'))
    assert CANARY not in repr(settings)


@pytest.mark.parametrize("missing", ["confluent_kafka.schema_registry", "fastavro", "jsonschema", "google.protobuf"])
def test_missing_packages_are_a_problem_of_check_and_of_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    for name in [*sys.modules]:
        if name.startswith(("outbox_relay.sinks.kafka.", "confluent_kafka.schema_registry")):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    form = {"jsonschema": "json", "google.protobuf": "protobuf"}.get(missing, "avro")
    settings = load_text(tmp_path, text(f'{URL}\nformat = "{form}"'))
    problem = "sinks.events.registry: needs pip install 'outbox-relay[registry]'"
    assert unusable_plugins(settings) == [problem]
    events = settings.sinks["events"]
    assert isinstance(events, KafkaSettings)
    with pytest.raises(ConfigurationError, match="needs pip install"):
        kafka_sink("events", events, 15.0)


@pytest.mark.processes
def test_sink_without_a_registry_imports_nothing_of_it(tmp_path: Path) -> None:
    file = tmp_path / "relay.toml"
    file.write_text(text(""))
    assert load(file, {}).sinks
    code = (
        "import sys; from pathlib import Path; from outbox_relay.service.kafka import kafka_sink; "
        "from outbox_relay.settings import load; "
        "kafka_sink('events', load(Path(sys.argv[1]), {}).sinks['events'], 15.0); "
        "print([m for m in sys.modules if m.startswith(('confluent_kafka.schema_registry', 'fastavro', 'httpx', "
        "'google.protobuf', 'jsonschema', 'outbox_relay.sinks.kafka.schemas'))])"
    )
    done = subprocess.run([sys.executable, "-c", code, file], capture_output=True, check=True, text=True)
    assert done.stdout == "[]\n"
