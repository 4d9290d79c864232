"""Webhook sinks from settings: what they share, and what a reload changes."""

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
from outbox_relay.sinks.webhook import WebhookSink
from tests.support.receiver import Receiver
from tests.support.receiver.certificates import Authority

SECRET = "whsec_" + base64.b64encode(b"k" * 24).decode()
OTHER = "whsec_" + base64.b64encode(b"o" * 24).decode()
SINK = """
[sinks.{name}]
type = "webhook"
url = "{url}"
secrets_file = "{directory}/secrets"
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


async def deliver(sink: WebhookSink, receiver: Receiver) -> bool:
    """Return whether one event arrives and its signature verifies."""
    await sink.open()
    verdicts = await sink.deliver([an_event()], soon())
    await sink.close()
    return list(verdicts) == [DELIVERED] and receiver.requests[-1].problem is None


async def test_a_reload_changes_secrets_and_certificates_of_all_who_share_them(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    (tmp_path / "secrets").write_text(SECRET)
    show(tmp_path, authority.client_files("unknown"))
    with Receiver(tls=authority.asks_for_certificate(), secrets=[OTHER]) as receiver:
        read = settings(tmp_path, receiver.url)
        webhooks = Webhooks(read, OwnAddresses(read))
        sinks = [webhooks.make(name) for name in ("a", "b")]
        assert not await deliver(sinks[0], receiver)
        show(tmp_path, authority.client_files())
        (tmp_path / "secrets").write_text(OTHER)
        webhooks.renew(await webhooks.read(read))
        assert [await deliver(sink, receiver) for sink in sinks] == [True, True]


@pytest.mark.parametrize("bad", ["secrets", "client.pem", "key.pem", "ca.pem"])
async def test_a_reload_that_cannot_be_read_changes_nothing(tmp_path: Path, bad: str) -> None:
    authority = Authority(tmp_path)
    (tmp_path / "secrets").write_text(SECRET)
    show(tmp_path, authority.client_files())
    with Receiver(tls=authority.asks_for_certificate(), secrets=[SECRET]) as receiver:
        read = settings(tmp_path, receiver.url)
        webhooks = Webhooks(read, OwnAddresses(read))
        sink = webhooks.make("a")
        (tmp_path / "secrets").write_text(OTHER)
        (tmp_path / bad).write_text("hunter2")
        with pytest.raises(ConfigurationError, match=rf"relay\.toml:2: sinks\.a: .*{bad}") as refused:
            await webhooks.read(read)
        assert "hunter2" not in str(refused.value)
        assert any(bad in line for line in unreadable(read))
        assert await deliver(sink, receiver)


async def test_other_files_take_a_restart_and_disturb_no_reload(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    (tmp_path / "secrets").write_text(SECRET)
    show(tmp_path, authority.client_files())
    with Receiver(tls=authority.asks_for_certificate(), secrets=[OTHER]) as receiver:
        read = settings(tmp_path, receiver.url)
        webhooks = Webhooks(read, OwnAddresses(read))
        sink = webhooks.make("a")
        (tmp_path / "key.pem").rename(tmp_path / "new.pem")
        (tmp_path / "secrets").write_text(OTHER)
        webhooks.renew(await webhooks.read(settings(tmp_path, receiver.url, key="new.pem", names=("a",))))
        assert await deliver(sink, receiver)


def test_a_sink_whose_files_are_missing_is_not_made(tmp_path: Path) -> None:
    (tmp_path / "secrets").write_text(SECRET)
    read = settings(tmp_path, "https://crm.example.com", names=("a",))
    with pytest.raises(ConfigurationError, match=r"relay\.toml:2: sinks\.a: ca_file .*: No such file"):
        Webhooks(read, OwnAddresses(read)).make("a")
    assert [line.split(": ")[1] for line in unreadable(read)] == ["sinks.a"]
