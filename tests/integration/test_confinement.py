"""A relay with every feature, and the page, with only the rights that the documented ways of deploying leave."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.archives import archived
from tests.support.collector import Collector
from tests.support.confined import library
from tests.support.database import Database, query
from tests.support.days import date_ago, emit_ago, fill_days, keep, one
from tests.support.installed import absent
from tests.support.kafka import KafkaBroker
from tests.support.ports import free_port
from tests.support.receiver import Receiver
from tests.support.receiver.answers import say
from tests.support.receiver.signatures import SECRET
from tests.support.service import RelayService
from tests.support.wait import until

ROOT = Path(__file__).parents[2]
UNIT = str(ROOT / "deploy/systemd/outbox-relay.service")
CONFINED = "tests.support.confined"
CONFIG = """
[database]
dsn_file = "{folder}/dsn"
[retention]
keep_days = 5
archive = "{archive}"
archive_format = "{form}"
[notify]
sink = "crm"
[sinks.events]
type = "kafka"
topic = "{topic}"
start = "now"
producer = {{ "bootstrap.servers" = "{bootstrap}" }}
[sinks.crm]
type = "webhook"
start = "now"
url = "{url}"
secrets = ["{secret}"]
allow_http = true
allow_networks = ["127.0.0.0/8"]
[sinks.mail]
type = "python"
start = "now"
handler = "examples.handlers.shop_handlers:send_mail"
[sinks.billing]
type = "python"
start = "now"
handler = "examples.handlers.shop_handlers:write_invoice"
dsn = "{dsn}"
transaction = true
[schedules.clean_up]
cron = "* * * * *"
type = "clean.up"
[routes]
"order.*" = ["events", "crm", "mail", "billing"]
"clean.*" = ["events"]
"""


@pytest.fixture(params=["systemd", "container"])
def unit(request: pytest.FixtureRequest) -> str:
    """Return the argument of the program that confines: the unit, or nothing but a read-only file system."""
    if request.param == "container":
        return "-"
    try:
        library()
    except OSError:
        absent("libseccomp", "libseccomp2")
    if shutil.which("systemd-analyze") is None:
        absent("systemd-analyze", "systemd")
    return UNIT


def test_a_relay_with_every_feature(
    unit: str, database: Database, kafka: KafkaBroker, topic: str, tmp_path: Path
) -> None:
    state, form = tmp_path / "state", "parquet" if unit == "-" else "jsonl.zst"
    state.mkdir()
    (tmp_path / "dsn").write_text(database.dsn)
    with database.connect(autocommit=True) as owner:
        owner.execute("create table invoices (event uuid, total integer)")
        fill_days(owner, 12, 12)
        emit_ago(owner, 0)
        keep(owner, 5, archive=True)
        with Receiver(say(204)) as receiver, Collector() as collector:
            text = CONFIG.format(
                folder=tmp_path,
                archive=state / "archive",
                form=form,
                topic=topic,
                bootstrap=kafka.bootstrap,
                url=receiver.url,
                secret=SECRET,
                dsn=database.dsn,
            )
            variables = {"SHOP_MAILBOX": str(state / "mails"), **collector.variables}
            relay = RelayService(tmp_path, text, program=(CONFINED, unit, str(state)), **variables)
            relay.config.write_text(relay.config.read_text().replace('listen = "127.0.0.1:', 'listen = "[::]:'))
            with relay:
                emit = "select outbox.emit('order.created', %s::jsonb, key => 'order-1')::text"
                uid = str(one(owner, emit, json.dumps({"id": 1, "customer": "Ada", "total": 1250})))
                invoices = "select event::text, total from invoices"
                until(lambda: query(database, invoices) == [(uid, 1250)], seconds=60, what="the invoice is written")
                until((state / "mails" / uid).exists, seconds=60, what="the mail is written")
                until(lambda: receiver.uids == [uid], seconds=60, what="the webhook has the event")
                until(lambda: uid in _uids(kafka, topic), seconds=60, what="Kafka has the event")
                until(lambda: collector.spans, seconds=60, what="spans are exported")
                emptied = "select archived_to from outbox.day where emptied_at is not null"
                until(lambda: query(database, emptied), seconds=60, what="the day is archived and emptied")
                [(address,)] = query(database, emptied)
                assert Path(address).name.startswith(date_ago(12))
                assert len(archived(address)) == 3
                for host in ("127.0.0.1", "::1"):
                    assert _get(relay.port, "/livez", host) == _get(relay.port, "/metrics", host) == 200
                assert relay.stop() == 0
                unusual = [line for line in relay.lines() if line.get("level") in ("warning", "error")]
                assert [line for line in unusual if line["event"] != "kafka.client"] == []
    assert {path.name for path in tmp_path.iterdir()} == {"dsn", "relay.toml", "relay.log", "state"}


def test_the_page(unit: str, database: Database, tmp_path: Path) -> None:
    port = free_port()
    command = [sys.executable, "-m", CONFINED, unit, str(tmp_path)]
    environment = {**os.environ, "OUTBOX_RELAY_CONFIG": ""}
    with subprocess.Popen(
        [*command, "ui", "--dsn", database.dsn, "--listen", f"127.0.0.1:{port}"], cwd=ROOT, env=environment
    ) as page:
        try:
            until(lambda: _get(port) == 200 or page.poll() is not None, seconds=60, what="the page answers")
            assert _get(port) == 200
        finally:
            page.terminate()
    assert page.returncode == 0


def _uids(kafka: KafkaBroker, topic: str) -> list[str]:
    return [str(record.headers["id"], "ascii") for record in kafka.read_all(topic) if record.headers["id"]]


def _get(port: int, path: str = "/", host: str = "127.0.0.1") -> int:
    connection = http.client.HTTPConnection(host, port, timeout=30)
    try:
        connection.request("GET", path)
        return connection.getresponse().status
    except OSError:
        return 0
    finally:
        connection.close()
