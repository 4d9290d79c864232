"""The relay's own database and HTTP port, which no webhook is sent to."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest

from outbox_relay.domain.errors import ConfigurationError
from outbox_relay.postgres.dsn import endpoints
from outbox_relay.service.own_addresses import OwnAddresses
from outbox_relay.settings import load

SECRET = "whsec_" + base64.b64encode(b"k" * 24).decode()
LOCAL = [("localhost", 5432), ("127.0.0.1", 5432), ("::1", 5432)]
FILE = """
[database]
dsn = "{dsn}"
[http]
listen = "{listen}"
[sinks.crm]
type = "webhook"
url = "{url}"
secrets = ["{secret}"]
allow_http = true
allow_networks = ["127.0.0.0/8", "::1", "10.0.0.0/8"]
[routes]
"*" = ["crm"]
"""


def written(tmp_path: Path, url: str, dsn: str = "host=db.internal", listen: str = "127.0.0.1:8080") -> Path:
    """Write a file with these settings and return its path."""
    path = tmp_path / "relay.toml"
    path.write_text(FILE.format(url=url, dsn=dsn, listen=listen, secret=SECRET))
    return path


@pytest.mark.parametrize(
    ("dsn", "expected"),
    [
        ("postgresql://u:p@db.internal:6000/shop", [("db.internal", 6000)]),
        ("host=a,b port=1,2", [("a", 1), ("b", 2)]),
        ("host=a,b port=,2", [("a", 5432), ("b", 2)]),
        ("host=db.internal hostaddr=10.0.0.5 port=6000", [("db.internal", 6000), ("10.0.0.5", 6000)]),
        ("hostaddr=10.0.0.5", [("10.0.0.5", 5432)]),
        ("dbname=shop", LOCAL),
        ("postgresql://%2Ftmp/shop", LOCAL),
        ("no connection string", []),
    ],
)
def test_where_a_connection_string_leads(dsn: str, expected: list[tuple[str, int]]) -> None:
    assert endpoints(dsn, {}) == expected


def test_what_a_connection_string_leaves_out_comes_from_the_environment() -> None:
    assert endpoints("dbname=shop", {"PGHOST": "db.internal", "PGPORT": "6000"}) == [("db.internal", 6000)]
    assert endpoints("host=a port=1", {"PGHOST": "db.internal", "PGPORT": "6000"}) == [("a", 1)]


@pytest.mark.parametrize(
    ("url", "dsn", "what"),
    [
        ("https://db.internal:5432/", "host=db.internal", "database"),
        ("http://10.0.0.5:6000/", "postgresql://u:p@10.0.0.5:6000/shop", "database"),
        ("http://[::1]:5432/", "host=localhost", "database"),
        ("http://[::ffff:127.0.0.1]:5432/", "host=127.0.0.1", "database"),
        ("http://127.0.0.1:8080/x", "host=db.internal", "HTTP port"),
        ("http://localhost:8080/x", "host=db.internal", "HTTP port"),
    ],
)
def test_a_url_that_leads_to_the_relay_is_refused_at_load(tmp_path: Path, url: str, dsn: str, what: str) -> None:
    path = written(tmp_path, url, dsn)
    with pytest.raises(ConfigurationError) as refused:
        load(path, {})
    assert str(refused.value) == (
        f"{path}:8: sinks.crm.url: leads to the relay's own {what}: name another host or port"
    )


@pytest.mark.parametrize(
    ("url", "listen"),
    [
        ("http://127.0.0.1:8081/", "127.0.0.1:8080"),
        ("http://10.0.0.5:5432/", "127.0.0.1:8080"),
        ("http://127.0.0.1:8080/", ""),
    ],
)
def test_other_ports_and_hosts_are_taken(tmp_path: Path, url: str, listen: str) -> None:
    load(written(tmp_path, url, listen=listen), {})


@pytest.mark.parametrize(("url", "listen"), [("http://127.0.0.1:80/", "0.0.0.0:80"), ("http://[::1]/", "[::]:80")])
def test_a_listener_everywhere_is_on_the_loopback_address_too(tmp_path: Path, url: str, listen: str) -> None:
    with pytest.raises(ConfigurationError, match="leads to the relay's own HTTP port"):
        load(written(tmp_path, url, listen=listen), {})


def test_names_are_known_with_their_addresses(tmp_path: Path) -> None:
    own = OwnAddresses(load(written(tmp_path, "https://x.example", "host=localhost port=6000"), {}))
    assert set(own()) == {("localhost", 6000), ("127.0.0.1", 8080)}
    own.add("127.0.0.1", 43210)
    own.refresh()
    assert {("localhost", 6000), ("127.0.0.1", 6000), ("127.0.0.1", 8080), ("127.0.0.1", 43210)} <= set(own())


def test_the_server_behind_a_pooler_is_the_relays_own_too(tmp_path: Path) -> None:
    behind = 'host=pooler port=6432"\npooler = "transaction"\nlisten_dsn = "host=10.0.0.6 port=6000'
    own = OwnAddresses(load(written(tmp_path, "https://x.example", behind), {}))
    assert set(own()) == {("pooler", 6432), ("10.0.0.6", 6000), ("127.0.0.1", 8080)}
    with pytest.raises(ConfigurationError, match="leads to the relay's own database"):
        load(written(tmp_path, "http://10.0.0.6:6000/", behind), {})


def test_a_name_that_is_not_found_keeps_its_last_addresses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = OwnAddresses(load(written(tmp_path, "https://x.example", "host=localhost port=6000"), {}))
    own.refresh()

    def unknown(*_: object, **__: object) -> None:
        raise OSError("a name server that is down cannot be made here")

    before = set(own())
    monkeypatch.setattr("outbox_relay.service.own_addresses.socket.getaddrinfo", unknown)
    own.refresh()
    assert set(own()) == before
