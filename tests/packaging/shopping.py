"""The requirements for the shop of compose.yaml, however its services are run."""

import httpx

from tests.packaging.stack import READY_SECONDS, Running, Stack
from tests.support.kafka.records import read_all
from tests.support.ports import LOOPBACK
from tests.support.wait import until

EVENTS = 20


def set_up(stack: Stack) -> None:
    """Make the schema, and make it again."""
    made = stack.run("migrate")
    assert made.returncode == 0, made.stderr
    assert "emit to shop_app, operate to page, relay to relay" in made.stdout
    assert stack.run("migrate").returncode == 0


def open_relay(stack: Stack) -> tuple[Running, Running]:
    """Return a receiver and a relay that is checked, started and ready."""
    receiver = stack.start("receiver")
    until(lambda: receiver.still() and receiver.lines("receiving"), seconds=READY_SECONDS, what="the receiver listens")
    checked = stack.run("relay", "outbox-relay", "check", "--online")
    assert checked.returncode == 0, checked.stderr
    relay = stack.start("relay")
    until(
        lambda: relay.still() and stack.run("relay", "outbox-relay", "health").returncode == 0,
        seconds=READY_SECONDS,
        what="outbox-relay health says that the relay is ready",
    )
    return receiver, relay


def look(stack: Stack) -> None:
    """Assert that the page asks for a name and a password, and shows the sinks."""
    page, address = stack.start("ui"), f"http://{LOOPBACK}:{stack.page_port}/"
    until(lambda: page.still() and page.lines("http://"), seconds=READY_SECONDS, what="the page is served")
    assert httpx.get(address).status_code == 401
    shown = httpx.get(address, auth=("operator", "development-only"), timeout=READY_SECONDS)
    assert shown.status_code == 200, shown.text[-2000:]
    assert "/sinks/crm" in shown.text
    assert page.stop() == 0, page.log.read_text()[-3000:]


def trade(stack: Stack, receiver: Running, relay: Running) -> None:
    """Place and pay orders, and assert that every event arrives where it should, and that the receiver verifies it."""
    shop = stack.start("shop")
    until(
        lambda: shop.still() and relay.still() and stack.emitted("order.%") >= EVENTS,
        seconds=READY_SECONDS,
        what="the shop trades",
    )
    assert shop.stop() == 0
    assert shop.lines("the shop is closed")
    until(
        lambda: relay.still() and not any(sink["backlog"] for sink in stack.status()["sinks"].values()),
        seconds=READY_SECONDS,
        what="outbox-relay status says that nothing is left to deliver",
    )
    assert receiver.lines("refused") == []
    assert len(receiver.lines("new order.")) == stack.emitted("order.%")
    for topic in ("order.created", "order.paid", "payment.captured"):
        # Other tests may use a topic of this name on the same broker, and a session that restarts repeats records.
        arrived = {record.headers["id"] for record in read_all(stack.kafka.bootstrap, f"shop.{topic}")}
        assert not stack.uids(topic) - arrived, topic


def close(stack: Stack, receiver: Running, relay: Running) -> None:
    """Everybody ends when asked, with 0."""
    assert relay.stop() == 0, relay.log.read_text()[-3000:]
    assert receiver.stop() == 0
    assert stack.status()["relays"] == []
