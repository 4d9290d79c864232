"""compose.yaml without an engine: against the schema of the Compose Specification, and against itself."""

import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from psycopg.conninfo import conninfo_to_dict

from outbox_relay import settings
from outbox_relay.settings.kafka import KafkaSettings
from outbox_relay.settings.webhook import WebhookSettings
from tests.packaging import compose
from tests.packaging.compose import FILE, ROOT

WHOLE = compose.read()
SERVICES: dict[str, Any] = WHOLE["services"]
OURS = sorted(name for name, service in SERVICES.items() if service["image"].startswith("outbox-relay"))


def relay_settings() -> settings.Settings:
    """Return the settings of the file's relay."""
    (config,) = SERVICES["relay"]["configs"]
    assert config["target"] == "/etc/outbox-relay/relay.toml", "which is where the image looks"
    return settings.load(ROOT / WHOLE["configs"][config["source"]]["file"], SERVICES["relay"]["environment"])


def check_schema(file: Path) -> subprocess.CompletedProcess[str]:
    """Check the file against the official schema, which check-jsonschema carries."""
    return subprocess.run(
        [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", file],
        capture_output=True,
        check=False,
        text=True,
        timeout=60,
    )


def test_it_follows_the_compose_specification(tmp_path: Path) -> None:
    checked = check_schema(FILE)
    assert checked.returncode == 0, checked.stdout
    broken = tmp_path / "compose.yaml"
    broken.write_text(FILE.read_text().replace("depends_on:", "depend_on:"))
    assert check_schema(broken).returncode == 1


def test_it_starts_in_some_order() -> None:
    started: set[str] = set()
    while ready := {
        name
        for name, service in SERVICES.items()
        if name not in started and started.issuperset(service.get("depends_on", {}))
    }:
        started |= ready
    assert started == set(SERVICES)


def test_secrets_are_those_that_are_read() -> None:
    mounted = {f"{compose.SECRETS}/{secret}" for secret in SERVICES["relay"]["secrets"]}
    webhooks = [sink for sink in relay_settings().sinks.values() if isinstance(sink, WebhookSettings)]
    read = {str(each.secret.file) for sink in webhooks for each in sink.secrets}
    assert read == mounted
    assert SERVICES["receiver"]["environment"]["WEBHOOK_SECRETS_FILE"] in mounted
    assert set(SERVICES["receiver"]["secrets"]) == set(SERVICES["relay"]["secrets"])


def test_the_relay_leads_to_services_of_the_file() -> None:
    loaded = relay_settings()
    assert settings.warnings(loaded) == []
    assert conninfo_to_dict(loaded.database.dsn())["host"] == "db"
    sinks = loaded.sinks
    kafka, webhook = sinks["events"], sinks["crm"]
    assert isinstance(kafka, KafkaSettings)
    assert isinstance(webhook, WebhookSettings)
    (listener,) = (
        entry
        for entry in SERVICES["kafka"]["environment"]["KAFKA_ADVERTISED_LISTENERS"].split(",")
        if entry.startswith("PLAINTEXT://")
    )
    assert kafka.producer["bootstrap.servers"] == listener.removeprefix("PLAINTEXT://")
    url = urlsplit(webhook.url)
    assert url.hostname == "receiver"
    assert SERVICES["receiver"]["environment"]["RECEIVER_LISTEN"] == f"0.0.0.0:{url.port}"
    (subnet,) = (entry["subnet"] for entry in WHOLE["networks"]["default"]["ipam"]["config"])
    assert [str(network) for network in webhook.allow_networks] == [subnet]


def test_the_relay_listens_where_its_port_leads() -> None:
    address = relay_settings().http.address
    assert address is not None
    (port,) = SERVICES["relay"]["ports"]
    at, _, inside = port.rpartition(":")
    assert address == ("::", int(inside))
    assert at.startswith("127.0.0.1:"), "nobody but this machine"


def test_the_page_asks_for_a_password_and_leads_to_this_machine_only() -> None:
    options = dict(each.partition("=")[::2] for each in SERVICES["ui"]["command"][1:])
    assert (options["--auth"], options["--listen"]) == ("basic", "0.0.0.0:8090")
    assert SERVICES["ui"]["ports"] == ["127.0.0.1:8090:8090"]
    assert [options["--users"]] == [f"{compose.SECRETS}/{secret}" for secret in SERVICES["ui"]["secrets"]]
    role = conninfo_to_dict(options["--dsn"])["user"]
    assert f"--grant-operate={role}" in SERVICES["migrate"]["command"]


@pytest.mark.parametrize("name", OURS)
def test_our_containers_have_no_rights_to_lose(name: str) -> None:
    service = SERVICES[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert "user" not in service, "the image's own is not root"
