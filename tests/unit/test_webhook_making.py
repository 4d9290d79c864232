"""Webhook sinks from settings: what they share, and what they are made with."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest

from outbox_relay.domain.errors import ConfigurationError
from outbox_relay.domain.outcomes import DELIVERED
from outbox_relay.service.own_addresses import OwnAddresses
from outbox_relay.service.webhooks import Webhooks, unreadable
from outbox_relay.settings import Settings, load
from outbox_relay.sinks.contract.handing import an_event, soon
from outbox_relay.sinks.posting import Client
from tests.support.receiver import Receiver
from tests.support.receiver.certificates import Authority

SECRET = "whsec_" + base64.b64encode(b"k" * 24).decode()
OTHER = "whsec_" + base64.b64encode(b"o" * 24).decode()
SINK = """
[sinks.{name}]
type = "webhook"
url = "{url}"
secrets = [{{ file = "{directory}/secrets" }}]
allow_networks = ["127.0.0.0/8"]
ca_file = "{directory}/ca.pem"
client_certificate = "{directory}/client.pem"
client_key = "{directory}/{key}"
"""


def settings(directory: Path, url: str, key: str = "key.pem", names: tuple[str, ...] = ("a", "b")) -> Settings:
    """Return sinks that share their files, which exist."""
    path = directory / "relay.toml"
    path.write_text("".join(SINK.format(name=name, url=url, directory=directory, key=key) for name in names))
    return load(path, {})


def show(directory: Path, certificate: tuple[Path, Path]) -> None:
    """Let the sinks show this certificate."""
    for path, name in zip(certificate, ("client.pem", "key.pem"), strict=True):
        (directory / name).write_bytes(path.read_bytes())


async def deliver(sink: Client, receiver: Receiver) -> bool:
    """Return whether one event arrives and its signature verifies."""
    await sink.open()
    verdicts = await sink.deliver([an_event()], soon())
    await sink.close()
    return list(verdicts) == [DELIVERED] and receiver.requests[-1].problem is None


async def test_new_clients_use_the_secrets_and_certificates_that_the_files_have_now(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    (tmp_path / "secrets").write_text(SECRET)
    show(tmp_path, authority.client_files("unknown"))
    with Receiver(tls=authority.asks_for_certificate(), secrets=[OTHER]) as receiver:
        read = settings(tmp_path, receiver.url)
        before = Webhooks(read, OwnAddresses(read)).make("a").client
        assert not await deliver(before, receiver)
        show(tmp_path, authority.client_files())
        (tmp_path / "secrets").write_text(OTHER)
        webhooks = Webhooks(read, OwnAddresses(read))
        sinks = [webhooks.make(name).client for name in ("a", "b")]
        assert [await deliver(sink, receiver) for sink in sinks] == [True, True]
        assert not await deliver(before, receiver), "it keeps what it was made with"


@pytest.mark.parametrize("bad", ["secrets", "client.pem", "key.pem", "ca.pem"])
def test_a_file_that_cannot_be_read_is_named_without_its_contents(tmp_path: Path, bad: str) -> None:
    authority = Authority(tmp_path)
    (tmp_path / "secrets").write_text(SECRET)
    show(tmp_path, authority.client_files())
    read = settings(tmp_path, "https://crm.example.com")
    (tmp_path / bad).write_text("hunter2")
    with pytest.raises(ConfigurationError, match=rf"relay\.toml:2: sinks\.a: .*{bad}") as refused:
        Webhooks(read, OwnAddresses(read)).make("a")
    assert "hunter2" not in str(refused.value)
    assert any(bad in line for line in unreadable(read))


def test_a_sink_whose_files_are_missing_is_not_made(tmp_path: Path) -> None:
    (tmp_path / "secrets").write_text(SECRET)
    read = settings(tmp_path, "https://crm.example.com", names=("a",))
    with pytest.raises(ConfigurationError, match=r"relay\.toml:2: sinks\.a: ca_file .*: No such file"):
        Webhooks(read, OwnAddresses(read)).make("a")
    assert [line.split(": ")[1] for line in unreadable(read)] == ["sinks.a"]
