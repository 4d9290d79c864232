"""Deliveries of a database that was upgraded."""

from __future__ import annotations

from tests.support.database import Database, query
from tests.support.receiver import Receiver
from tests.support.receiver.signatures import SECRET

CONFIG = """
[database]
dsn = "{dsn}"
[relay]
lease_seconds = 3
[sinks.crm]
type = "webhook"
url = "{url}"
secrets = ["{secret}"]
timeout_seconds = 3
allow_http = true
allow_networks = ["127.0.0.0/8"]
[sinks.crm.retry]
base_seconds = 3600
[routes]
"*" = ["crm"]
"""


def config(dsn: str, receiver: Receiver) -> str:
    """Return settings with one webhook for every type; what fails waits until a test makes it due."""
    return CONFIG.format(dsn=dsn, url=receiver.url, secret=SECRET)


def behind(database: Database) -> list[tuple[str]]:
    """Return the uids of the log that the position of their shard has not passed."""
    return query(
        database,
        "select e.uid::text from outbox.event e join outbox.standing p on p.shard = e.shard "
        "where e.id > greatest(p.a_seq, p.last_id)",
    )


def left(database: Database, receiver: Receiver) -> set[str]:
    """Return the uids of events that are neither delivered nor dead."""
    states = query(database, "select uid::text, state from outbox.delivery")
    dead = {uid for uid, state in states if state == "dead"}
    events = {uid for (uid,) in query(database, "select uid::text from outbox.event")}
    return {uid for uid, state in states if state != "dead"} | (events - dead - set(receiver.uids))
