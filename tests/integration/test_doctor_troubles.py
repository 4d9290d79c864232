"""`doctor` beside real relays in trouble: it names at once what `status` knows, with the oldest event and the error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.command import inside
from tests.support.database import Database
from tests.support.emitting import emit_payload
from tests.support.findings import EXPECTED
from tests.support.ports import free_port
from tests.support.receiver import Receiver
from tests.support.receiver.answers import Behaviour, chosen, say
from tests.support.receiver.request import Request
from tests.support.receiver.signatures import SECRET
from tests.support.roles import new_role
from tests.support.service import RelayService
from tests.support.wait import until

CONFIG = """
[database]
dsn = "{dsn}"
[relay]
lease_seconds = {lease}
[sinks.crm]
type = "webhook"
url = "{url}"
secrets = ["{secret}"]
allow_http = true
allow_networks = ["127.0.0.0/8"]
[routes]
"*" = ["crm"]
"""


def relay_of(database: Database, directory: Path, url: str, name: str = "relay", lease: int = 15) -> RelayService:
    """Return a relay of a webhook."""
    text = CONFIG.format(dsn=database.dsn, url=url, secret=SECRET, lease=lease)
    return RelayService(directory, text, name, OUTBOX_RELAY_RELAY__NAME=name)


def found(database: Database, *arguments: str, user: str | None = None) -> dict[str, Any]:
    """Return the findings of `doctor --json` by id, without those on every server of the tests."""
    dsn = database.dsn if user is None else f"{database.dsn} user={user}"
    ended = inside("doctor", "--json", "--dsn", dsn, *arguments)
    findings = {each["id"]: each for each in ended.json["findings"] if each["id"] not in EXPECTED}
    return {name: each for name, each in findings.items() if each["severity"] != "ok"}


def circuit(database: Database) -> str:
    """Return the circuit of the sink as `status` shows it."""
    return inside("status", "--json", "--dsn", database.dsn).json["sinks"]["crm"]["circuit"]


def state_of(database: Database, uid: str) -> str:
    """Return the state of an event for the sink as `why` shows it."""
    return inside("why", uid, "--json", "--dsn", database.dsn).json["sinks"]["crm"]["state"]


def test_a_destination_that_is_down_is_named_at_once(database: Database, tmp_path: Path) -> None:
    with (
        new_role(database, "read") as role,
        relay_of(database, tmp_path, f"http://127.0.0.1:{free_port()}/") as relay,
    ):
        assert inside("migrate", "--grant-read", role, "--dsn", database.dsn).code == 0
        oldest, *_ = [emit_payload(database, "{}", f"key-{n}") for n in range(40)]
        until(lambda: circuit(database) != "closed", seconds=60, what="the circuit opens")
        for user in (None, role):
            findings = found(database, user=user)
            assert findings.keys() == {"destination-down"}
            down = findings["destination-down"]
            assert (down["severity"], down["summary"]) == ("warning", "the destination of sink crm is down")
            assert "Connection refused" in down["evidence"]
            assert f"oldest event: {oldest}" in down["evidence"]
        behind = found(database, "--max-oldest", "0")["sink-behind"]
        assert oldest in behind["evidence"]
        assert "repair the destination" in behind["advice"]
        assert relay.stop() == 0


def test_one_key_that_is_stuck_is_named_while_others_flow(database: Database, tmp_path: Path) -> None:
    def answer(request: Request) -> Behaviour:
        return say(500, body=b"no stock") if request.header("outbox-key") == "stuck" else say(204)

    with Receiver(chosen(answer)) as receiver, relay_of(database, tmp_path, receiver.url) as relay:
        stuck = emit_payload(database, "{}", "stuck")
        emit_payload(database, "{}", "stuck")
        until(lambda: "events-failing" in found(database), seconds=60, what="doctor names it")
        flowing = emit_payload(database, "{}", "other")
        until(lambda: flowing in receiver.uids, seconds=60, what="another key is delivered")
        until(lambda: state_of(database, flowing) == "settled", seconds=60, what="and settled")
        findings = found(database)
        assert findings.keys() == {"events-failing"}
        failing = findings["events-failing"]
        assert failing["severity"] == "warning"
        assert "answered 500" in failing["evidence"]
        assert "1 waiting, 1 held" in failing["evidence"]
        assert f"outbox-relay why {stuck}" in failing["advice"]
        behind = found(database, "--max-oldest", "0")
        assert behind.keys() == {"sink-behind"}
        assert "answered 500" in behind["sink-behind"]["evidence"]
        assert f"outbox-relay why {stuck}" in behind["sink-behind"]["advice"]
        assert inside("doctor", "--dsn", database.dsn).out.count("WARNING  events of sink crm fail") == 1
        assert relay.stop() == 0
