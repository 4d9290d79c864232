"""Settings that are wrong: each is refused by its place, with the fix, without a value that may be secret."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from outbox_relay.domain.errors import ConfigurationError
from outbox_relay.fields import fields, table
from outbox_relay.settings import Settings, load
from outbox_relay.settings.model import DatabaseSettings
from outbox_relay.settings.problems import STATEMENT_LINES
from outbox_relay.sinks import types
from tests.support.own_models import SINKS

CANARY = "hunter2canary"
SECRET = "whsec_" + base64.b64encode(b"k" * 24).decode()

FILE = f"""
[database]
dsn = "postgresql://relay@localhost/shop"
[relay]
lease_seconds = 15
[sinks.events]
type = "kafka"
topic = "shop.{{type}}"
producer = {{ "bootstrap.servers" = "localhost:9092" }}
[sinks.crm]
type = "webhook"
url = "https://crm.example.com/hooks"
secrets = ["{SECRET}"]
allow_networks = []
[sinks.crm.retry]
attempts = 12
[routes]
"order.*" = ["events", "crm"]
"""


@pytest.fixture(autouse=True, scope="module")
def packages_read_once() -> Iterator[None]:
    """Keep the list of installed packages, which takes 35 ms for each unknown type. No test here installs one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(types, "entry_points", cache(types.entry_points))
        yield


def refusal(tmp_path: Path, text: str, environ: dict[str, str] | None = None, dsn: str | None = None) -> list[str]:
    """Return the lines in which a file with this text is refused, without the directory."""
    path = tmp_path / "relay.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigurationError) as refused:
        load(path, environ or {}, dsn)
    assert CANARY not in str(refused.value)
    assert refused.value.__cause__ is None
    return str(refused.value).replace(f"{tmp_path}/", "").splitlines()


def changed(old: str, new: str) -> str:
    """Return the file with one part replaced."""
    assert FILE.count(old) == 1
    return FILE.replace(old, new)


def line_of(text: str, part: str) -> int:
    """Return the first line of ``text`` that contains ``part``."""
    return next(n for n, line in enumerate(text.splitlines(), 1) if part in line)


WEBHOOK_URL = "sinks.crm.url"
WRONG: list[tuple[str, str, str, str]] = [
    # what is replaced, by what, the place, what is said
    ("[database]", "[Database]", "Database", "there is no such setting; did you mean database?"),
    ("[database]", "[databse]", "databse", "there is no such setting; did you mean database?"),
    ("lease_seconds = 15", "lease_second = 15", "relay.lease_second", "did you mean lease_seconds?"),
    ("url =", 'claim = "row"\nurl =', "sinks.crm.claim", "'log' or 'rows'"),
    ("url =", 'fair_by = "tenant"\nurl =', "sinks.crm.fair_by", 'needs claim = "rows"'),
    ("url =", 'claim = "rows"\nfair_by = "key"\nurl =', "sinks.crm.fair_by", "'tenant'"),
    ("url =", 'claim = "rows"\nrows_max = 0\nurl =', "sinks.crm.rows_max", "greater than or equal to 1"),
    ("url =", "rows_max = 1000000001\nurl =", "sinks.crm.rows_max", "less than or equal to 1000000000"),
    ("url =", 'order = "key"\nclaim = "rows"\nurl =', "sinks.crm.order", 'give "none", or leave it out'),
    ("lease_seconds = 15", "zzz = 15", "relay.zzz", "valid: lease_seconds, name, park_after_seconds"),
    ("attempts = 12", "atempts = 12", "sinks.crm.retry.atempts", "did you mean attempts?"),
    ("allow_networks", "allow_network", "sinks.crm.allow_network", "did you mean allow_networks?"),
    ("url =", "topic =", "sinks.crm.topic", "there is no such setting"),
    ("[sinks.crm.retry]", "[sinks.crm.rety]", "sinks.crm.rety", "did you mean retry?"),
    (
        "lease_seconds = 15",
        "lease_seconds = 0.5",
        "relay.lease_seconds",
        "greater than or equal to 1 (time for which a relay",
    ),
    ("lease_seconds = 15", "lease_seconds = 601", "relay.lease_seconds", "less than or equal to 600"),
    ("lease_seconds = 15", "lease_seconds = nan", "relay.lease_seconds", "should be a finite number"),
    ("lease_seconds = 15", "lease_seconds = true", "relay.lease_seconds", "should be a number"),
    ("lease_seconds = 15", "park_after_seconds = 0", "relay.park_after_seconds", "should be greater than 0"),
    ("lease_seconds = 15", "stop_after_seconds = 0", "relay.stop_after_seconds", "should be greater than 0"),
    ("lease_seconds = 15", 'name = ""', "relay.name", "at least 1 character"),
    ("lease_seconds = 15", 'name = "a b"', "relay.name", "a label for people, 1 to 200 characters without blanks"),
    ("attempts = 12", "attempts = 0", "sinks.crm.retry.attempts", "greater than or equal to 1"),
    ("attempts = 12", "attempts = 1.5", "sinks.crm.retry.attempts", "should be a valid integer"),
    ("attempts = 12", "attempts = true", "sinks.crm.retry.attempts", "should be a number"),
    ("attempts = 12", "jitter = 2", "sinks.crm.retry.jitter", "less than or equal to 1 (part of a delay"),
    (
        "attempts = 12",
        "base_seconds = 7200",
        "sinks.crm.retry.max_seconds",
        "is 3600, should not be below base_seconds",
    ),
    (
        "[sinks.crm.retry]\nattempts = 12",
        "[sinks.crm.circuit]\nprobe_seconds = 3\nprobe_max_seconds = 2",
        "sinks.crm.circuit.probe_max_seconds",
        "is 2, should not be below probe_seconds, which is 3",
    ),
    ("allow_networks = []", "max_in_flight = 0", "sinks.crm.max_in_flight", "greater than or equal to 1"),
    ("allow_networks = []", "timeout_seconds = 61", "sinks.crm.timeout_seconds", "less than or equal to 60"),
    ("allow_networks = []", 'order = "keys"', "sinks.crm.order", "should be 'key' or 'none'"),
    ("allow_networks = []", 'start = "end"', "sinks.crm.start", "should be 'beginning' or 'now'"),
    ("allow_networks = []", 'when_dead = "stop"', "sinks.crm.when_dead", "should be 'skip' or 'hold'"),
    (
        "allow_networks = []",
        'forward_headers = ["a b"]',
        "sinks.crm.forward_headers[0]",
        "should be the name of a header",
    ),
    ("allow_networks = []", 'forward_headers = ["x", "Host"]', "sinks.crm.forward_headers[1]", "sets itself"),
    ("allow_networks = []", 'forward_headers = ["Webhook-Id"]', "sinks.crm.forward_headers[0]", "sets itself"),
    *[
        ("allow_networks = []", f"headers = {headers}", f"sinks.crm.headers.{place}", said)
        for headers, place, said in [
            ("{ Host = 'h' }", "Host", "is a header that the relay or the connection sets itself"),
            ("{ Webhook-Signature = 'v1,x' }", "Webhook-Signature", "sets itself"),
            ("{ content-type = 'x' }", "content-type", "sets itself"),
            ("{ Outbox-Key = 'x' }", "Outbox-Key", "sets itself"),
            ("{ X-Forwarded-For = '::1' }", "X-Forwarded-For", "sets itself"),
            ("{ proxy-authorization = 'x' }", "proxy-authorization", "sets itself"),
            ("{ cookie = 'x' }", "cookie", "sets itself"),
            ("{ '' = 'x' }", '""', "should be the name of a header"),
            ("{ 'x a' = 'x' }", '"x a"', "should be the name of a header"),
            ("{ 'x:' = 'x' }", '"x:"', "should be the name of a header"),
            ('{ "x\\r\\ny" = "x" }', '"x\\r\\ny"', "should be the name of a header"),
            (f"{{ {'x' * 129} = 'x' }}", '"' + "x" * 80 + '…"', "should be the name of a header"),
            ("{ x-a = '1', X-A = '2' }", "X-A", "appears twice"),
            (f'{{ x-a = "{CANARY}\\r\\nx-b: 1" }}', "x-a", "should hold visible ASCII characters"),
            (f'{{ x-a = "{CANARY}\\u0000" }}', "x-a", "should hold visible ASCII characters"),
            (f'{{ x-a = " {CANARY}" }}', "x-a", "with spaces only between them"),
            (f'{{ x-a = "{CANARY}😀" }}', "x-a", "should hold visible ASCII characters"),
            ("{ x-a = '' }", "x-a", "should hold visible ASCII characters"),
            (f'{{ x-a = "{CANARY * 400}" }}', "x-a", "holds more than 4096 bytes"),
            ("{ x-a = 3 }", "x-a", 'should be text, or a table { env = "NAME" } or { file = "PATH" }'),
            (f"{{ x-a = {{ evn = '{CANARY}' }} }}", "x-a", "should be text, or a table"),
            ("{ x-a = { env = 'A', file = 'b' } }", "x-a", "should be text, or a table"),
            ("{ x-a = {} }", "x-a", "should be text, or a table"),
            (f"{{ x-a = {{ text = '{CANARY}' }} }}", "x-a", "should be text, or a table"),
            ("{ x-a = { env = '' } }", "x-a.env", "at least 1 character"),
        ]
    ],
    ("allow_networks = []", 'headers = "x"', "sinks.crm.headers", "should be a table"),
    (
        "allow_networks = []",
        "headers = { " + ", ".join(f"x-{n} = 'v'" for n in range(33)) + " }",
        "sinks.crm.headers",
        "should have at most 32 items",
    ),
    (
        "allow_networks = []",
        'forward_headers = ["x-tenant"]\nheaders = { X-Tenant = "t" }',
        "sinks.crm.headers.X-Tenant",
        "is in forward_headers too",
    ),
    ("allow_networks = []", "permanent_statuses = [400, 399]", "sinks.crm.permanent_statuses[1]", "is 399, should be"),
    ("allow_networks = []", "permanent_statuses = [600]", "sinks.crm.permanent_statuses[0]", "is 600, should be"),
    *[
        ("allow_networks = []", f"permanent_statuses = [{n}]", "sinks.crm.permanent_statuses[0]", "has a fixed meaning")
        for n in (408, 410, 425, 429, 502, 503, 504, 520, 527, 530)
    ],
    ("allow_networks = []", "accepted_statuses = [299]", "sinks.crm.accepted_statuses[0]", "is 299, should be 300"),
    ("allow_networks = []", "accepted_statuses = [503]", "sinks.crm.accepted_statuses[0]", "cannot be accepted"),
    (
        "allow_networks = []",
        "accepted_statuses = [409]\npermanent_statuses = [409]",
        "sinks.crm.permanent_statuses",
        "has 409, which accepted_statuses has too",
    ),
    ("allow_networks = []", 'permanent_statuses = ["4xx"]', "sinks.crm.permanent_statuses[0]", "valid integer"),
    ("allow_networks = []", "retry_after_max_seconds = 0", "sinks.crm.retry_after_max_seconds", "greater than 0"),
    (
        "allow_networks = []",
        "retry_after_max_seconds = 86401",
        "sinks.crm.retry_after_max_seconds",
        "or equal to 86400",
    ),
    ("allow_networks = []", 'client_key = "k.pem"', "sinks.crm.client_key", "needs client_certificate"),
    ("allow_networks = []", 'proxy = "https://egress:3128"', "sinks.crm.proxy", "should be http://HOST:PORT"),
    ("allow_networks = []", 'proxy = "http://egress:3128/x"', "sinks.crm.proxy", "should be http://HOST:PORT"),
    ("allow_networks = []", 'proxy = "http://egress:3128?x"', "sinks.crm.proxy", "should be http://HOST:PORT"),
    ("allow_networks = []", 'proxy = "http://egress"', "sinks.crm.proxy", "has no port: write http://HOST:PORT"),
    ("allow_networks = []", 'proxy = "http://egress:0"', "sinks.crm.proxy", "has a wrong port"),
    ("allow_networks = []", 'proxy = "http://:3128"', "sinks.crm.proxy", "has no host"),
    ("allow_networks = []", 'proxy = "http://u:p@egress:3128"', "sinks.crm.proxy", "put them into proxy_authoriz"),
    ("allow_networks = []", 'proxy_authorization_file = "p"', "sinks.crm.proxy_authorization_file", "needs proxy"),
    ("allow_networks = []", 'cloudevents = "batched"', "sinks.crm.cloudevents", "'none', 'binary' or 'structured'"),
    ("allow_networks = []", 'cloudevents_source = ""', "sinks.crm.cloudevents_source", "at least 1 character"),
    (
        "allow_networks = []",
        'cloudevents_source = "a b"',
        "sinks.crm.cloudevents_source",
        "should be a URI or the path",
    ),
    (
        "allow_networks = []",
        'cloudevents_source = "a%2"',
        "sinks.crm.cloudevents_source",
        "should be a URI or the path",
    ),
    ("allow_networks = []", 'allow_networks = ["10.1.0.1/16"]', "sinks.crm.allow_networks[0]", 'is "10.1.0.0/16"'),
    ("allow_networks = []", 'allow_networks = ["lan"]', "sinks.crm.allow_networks[0]", "should be a network such as"),
    ("allow_networks = []", "allow_networks = [1]", "sinks.crm.allow_networks[0]", "network"),
    (
        'type = "webhook"',
        'type = "webhok"',
        "sinks.crm.type",
        'should be "kafka" or "webhook" or "python"; did you mean webhook?',
    ),
    ('type = "webhook"', "", "sinks.crm.type", 'is required: "kafka" or "webhook" or "python"'),
    ("[sinks.crm]", "[sinks.Crm]", "sinks.Crm", "a sink's name is 1 to 40 of a-z, 0-9 and _"),
    ("[sinks.crm]", "[sinks.c__m]", "sinks.c__m", "holds no __"),
    ("[sinks.crm]", f"[sinks.{'c' * 41}]", f"sinks.{'c' * 41}", "1 to 40"),
    ("[sinks.crm]", '[sinks."c\\nm"]', 'sinks."c\\nm"', "a sink's name"),
    ("[sinks.crm]", "[sinks.x]", "sinks.crm.type", "is required"),
    ('topic = "shop.{type}"', "", "sinks.events.topic", "is required (topic of an event: a name, or a template"),
    ("shop.{type}", "shop.{typ}", "sinks.events.topic", "position 6: unknown field {typ}; did you mean {type}?"),
    ("shop.{type}", "shop.{type", "sinks.events.topic", "position 6: a lone '{'"),
    ("shop.{type}", "__consumer_offsets", "sinks.events.topic", "begins with __, as Kafka's internal topics do"),
    ("shop.{type}", "__{type}", "sinks.events.topic", "begins with __, as Kafka's internal topics do"),
    ('"shop.{type}"', '"a"\ntopics = ["b.*"]', "sinks.events.topics", "does not allow the topic of this sink"),
    ('"shop.{type}"', '"shop.{type}"\ntopics = ["b.*", "sho"]', "sinks.events.topics", "does not allow any topic"),
    ('"shop.{type}"', '"a"\ntopics = ["__a"]', "sinks.events.topics[0]", "begins with __"),
    ('"shop.{type}"', '"a"\ntopics = ["a b"]', "sinks.events.topics[0]", "should be the name of a topic, with *"),
    ('"shop.{type}"', '"a"\ntopics = [""]', "sinks.events.topics[0]", "should be the name of a topic, with *"),
    ('"shop.{type}"', '"a"\ntype_header = "a b"', "sinks.events.type_header", "should be the name of a header"),
    ('{ "bootstrap.servers" = "localhost:9092" }', "{}", "sinks.events.producer", 'needs "bootstrap.servers"'),
    (
        '"bootstrap.servers"',
        '"bootstrap.server"',
        'sinks.events.producer."bootstrap.server"',
        "librdkafka has no such setting; did you mean bootstrap.servers?",
    ),
    ('"localhost:9092"', '" "', "sinks.events.producer", 'needs "bootstrap.servers"'),
    ('"bootstrap.servers"', "bootstrap.servers", "sinks.events.producer.bootstrap", 'needs quotes: "bootstrap.…"'),
    ('{ "bootstrap.servers" = "localhost:9092" }', "3", "sinks.events.producer", "should be a table"),
    ('["events", "crm"]', '["event"]', 'routes."order.*"[0]', "there is no sink event; did you mean events?"),
    ('["events", "crm"]', '["crm", "nosuch"]', 'routes."order.*"[1]', "there is no sink nosuch; valid: crm, events"),
    ('["events", "crm"]', "[]", 'routes."order.*"', "a list of one or more names of sinks"),
    ('["events", "crm"]', '"events"', 'routes."order.*"', "a list of one or more names of sinks"),
    ('["events", "crm"]', "[1]", 'routes."order.*"', "a list of one or more names of sinks"),
    ('"order.*"', '"order *"', 'routes."order *"', "matches nothing"),
    ('"order.*"', '""', 'routes.""', "is empty"),
    ('"order.*"', '"outbox.*"', 'routes."outbox.*"', "are notices: set sink in [notify]"),
    ('"order.*"', '"outbox.dead"', 'routes."outbox.dead"', "are notices: set sink in [notify]"),
    ("[routes]", '[notify]\nsink = "crn"\n[routes]', "notify.sink", "there is no such sink; did you mean crm?"),
    ("[routes]", "[notify]\nlagging_seconds = 9\n[routes]", "notify.lagging_seconds", "greater than or equal to 10"),
    ("[routes]", "routes.x = 3\n[routs]", "routs", "did you mean routes?"),
]


@pytest.mark.parametrize(("old", "new", "place", "said"), WRONG, ids=[f"{row[2]}:{row[3][:20]}" for row in WRONG])
def test_wrong_value_is_refused_with_its_place(tmp_path: Path, old: str, new: str, place: str, said: str) -> None:
    lines = refusal(tmp_path, changed(old, new))
    assert any(re.match(rf"relay\.toml:\d+: {re.escape(place)}: ", line) and said in line for line in lines), lines


@pytest.mark.parametrize(
    ("text", "place", "part"),
    [
        (changed("lease_seconds = 15", "\n# lease\n\nlease_seconds = 0"), "relay.lease_seconds", "lease_seconds ="),
        (changed("attempts = 12", "attempts = 0"), "sinks.crm.retry.attempts", "attempts ="),
        (changed("attempts = 12", ""), "sinks.crm.url", "url ="),
        (changed('topic = "shop.{type}"', ""), "sinks.events.topic", "[sinks.events]"),
        (changed('["events", "crm"]', '[\n  "events",\n  "no",\n]'), 'routes."order.*"[1]', '"order.*" ='),
        (changed("[routes]", "[routes]\nx = ['''\n[sinks.crm]\n''']\n"), "routes.x[0]", "x = ["),
        (FILE + "[[sinks.crm.retry.x]]\n", "sinks.crm.retry.x", "[[sinks.crm.retry.x]]"),
        (changed("allow_networks = []", "retri.x = 1"), "sinks.crm.retri", "retri.x"),
        (changed('["events", "crm"]', "[3]") + "\n" * 5, 'routes."order.*"', '"order.*" ='),
        (changed("[relay]", "[ relay ] # the relay\nnam = ''"), "relay.nam", "nam ="),
    ],
)
def test_place_has_its_line(tmp_path: Path, text: str, place: str, part: str) -> None:
    if place == "sinks.crm.url":
        text = text.replace("https://", "ftp://")
    lines = [line for line in refusal(tmp_path, text) if f": {place}: " in line]
    assert [line.split(": ")[0] for line in lines] == [f"relay.toml:{line_of(text, part)}"], lines


def test_lines_are_counted_alike_in_files_of_windows(tmp_path: Path) -> None:
    text = changed("attempts = 12", "attempts = 0")
    path = tmp_path / "relay.toml"
    path.write_bytes(text.replace("\n", "\r\n").encode())
    with pytest.raises(ConfigurationError, match=f"^{path}:{line_of(text, 'attempts =')}: sinks.crm.retry.attempts: "):
        load(path, {})


def test_models_alone_do_not_repeat_a_value_either() -> None:
    with pytest.raises(ValidationError) as refused:
        DatabaseSettings.model_validate({"dsn": [CANARY], "pooler": CANARY})
    assert "pooler" in str(refused.value)
    assert CANARY not in str(refused.value)


def test_addresses_are_not_judged_by_a_list_that_is_wrong(tmp_path: Path) -> None:
    text = changed("allow_networks = []", 'allow_networks = ["10.0.0.0/8", "lan"]')
    (line,) = refusal(tmp_path, text.replace("crm.example.com", "10.2.0.1"))
    assert "sinks.crm.allow_networks[1]: should be a network" in line


def test_items_of_an_array_of_tables_have_their_own_lines(tmp_path: Path) -> None:
    text = changed(f'secrets = ["{SECRET}"]\n', "").replace(
        "[sinks.crm.retry]",
        f'[[sinks.crm.secrets]]\nsecret = "{SECRET}"\n[[sinks.crm.secrets]]\nsecret = "{CANARY}"\n[sinks.crm.retry]',
    )
    (line,) = refusal(tmp_path, text)
    assert line.startswith(f"relay.toml:{line_of(text, CANARY)}: sinks.crm.secrets[1].secret: should be whsec_")


def test_place_behind_a_very_long_value_names_the_file_alone(tmp_path: Path) -> None:
    text = (
        'routes."a" = [\n' + '"crm",\n' * 2 * STATEMENT_LINES + "]\n" + changed("[routes]", "").replace("attempts", "a")
    )
    lines = refusal(tmp_path, text.replace('"order.*" = ["events", "crm"]', ""))
    assert lines == [
        "relay.toml: sinks.crm.retry.a: there is no such setting; valid: attempts, base_seconds, jitter, max_seconds"
    ]


def test_every_problem_is_listed_at_once(tmp_path: Path) -> None:
    text = changed("attempts = 12", "attempts = 0").replace("shop.{type}", "{typ}").replace('"crm"]', '"cm"]')
    text = text.replace("lease_seconds", "lease").replace(SECRET, CANARY)
    environ = {"OUTBOX_RELAY_SINKS__CRM__URI": "x", "OUTBOX_RELAY_HTTP__LISTEN": "x"}
    lines = refusal(tmp_path, text, environ)
    for part in (
        "sinks.crm.retry.attempts",
        "sinks.events.topic",
        'routes."order.*"[1]',
        "relay.lease",
        "sinks.crm.secrets[0].secret",
        "OUTBOX_RELAY_SINKS__CRM__URI",
        "http.listen",
    ):
        assert sum(part in line for line in lines) == 1, (part, lines)
    assert len(lines) == 7


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        *[("enable.idempotence", value) for value in ("false", '"false"', "0", '"no"', '""')],
        ("enable.gapless.guarantee", "false"),
        *[(name, value) for name in ("acks", "request.required.acks") for value in ("1", "0", '"1"', '"leader"')],
        *[
            (name, value)
            for name in ("message.timeout.ms", "delivery.timeout.ms")
            for value in ("1", '"300000"', '"x"')
        ],
        *[("max.in.flight", value) for value in ("2", "5", "0", '"1000000"', '"x"')],
        ("max.in.flight.requests.per.connection", "6"),
        ("retries", "2147483647"),
        ("message.send.max.retries", "0"),
        ("transactional.id", '"a"'),
        ("partitioner", '"random"'),
        ("delivery.report.only.error", "true"),
        ("queuing.strategy", '"lifo"'),
        ("dr_msg_cb", '"f"'),
        ("oauth_cb", '"f"'),
        ("on_delivery", '"f"'),
        ("logger", '"f"'),
    ],
)
def test_producer_setting_that_undoes_a_guarantee_is_refused_with_the_reason(
    tmp_path: Path, setting: str, value: str
) -> None:
    text = changed('"localhost:9092"', f'"localhost:9092", "{setting}" = {value}')
    (line,) = refusal(tmp_path, text)
    name = setting if re.fullmatch(r"\w+", setting) else f'"{setting}"'
    assert re.match(rf"relay\.toml:9: sinks\.events\.producer\.{name}: should .*: \w+ \w+", line), line


def test_each_refused_producer_setting_is_a_problem_of_its_own(tmp_path: Path) -> None:
    text = changed('"bootstrap.servers" = "localhost:9092"', f'acks = 1, retries = 3, "transactional.id" = "{CANARY}"')
    assert len(refusal(tmp_path, text)) == 4


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("http://crm.example.com", "plain http is refused: use https, or set allow_http = true"),
        ("ftp://crm.example.com", "should begin with https://"),
        ("javascript:alert(1)", "should begin with https://"),
        ("crm.example.com/hook", "should begin with https://"),
        ("", "should be a URL of 1 to 2048 characters"),
        ("https://h/" + "a" * 2048, "should be a URL of 1 to 2048 characters"),
        (f"https://user:{CANARY}@crm.example.com", "holds credentials"),
        (f"https://{CANARY}@crm.example.com", "holds credentials"),
        ("https://@crm.example.com", "holds credentials"),
        (f"https://crm.example.com/#{CANARY}", "holds a fragment"),
        ("https://crm.example.com/#", "holds a fragment"),
        ("https://", "has no host"),
        ("https:///hook", "has no host"),
        ("https:crm.example.com", "has no host"),
        ("https://:443/", "has no host"),
        ("https://.", "has no host"),
        *[(f"https://h.example:{port}/", "has a wrong port") for port in ("0", "99999", "-1", "x", "", "+80")],
        ("https://a b.example", "holds a space"),
        ("https://h.example/a\\tb", "holds a space, a control character"),
        ("https://h.example/a\\u0000", "holds a space, a control character"),
        ("http://127.0.0.1:p\\\\@evil/", "a backslash"),
        ("https://bücher.example", "a letter beyond ASCII"),
        ("https://\uff11\uff12\uff17.0.0.1", "a letter beyond ASCII"),
        ("https://a..b", "has a host that is no name"),
        ("https://" + "a" * 64 + ".example", "has a host that is no name"),
        ("https://" + "a.a" * 100, "has a host that is no name"),
        ("https://h%00.example", "has a host that is no name"),
        ("https://-a.example", "has a host that is no name"),
        ("https://a,b", "has a host that is no name"),
        ("https://[::1", "is no IPv6 address"),
        ("https://[zz]/", "no"),
        ("https://a[::1]/", "no"),
        ("https://[fe80::1%25eth0]/", "has an address with a zone"),
        *[
            (f"https://{host}/", "neither a name nor an address")
            for host in ("127.1", "2130706433", "0x7f.1", "0177.0.0.1", "0", "0x", "1.2.3.4.5", "256.0.0.1", "a.0x1")
        ],
        ("https://127.0.0.1", "leads to the loopback address 127.0.0.1: list its network in allow_networks"),
        ("https://127.0.0.1./", "leads to the loopback address"),
        ("https://0.0.0.0", "leads to the unspecified address"),
        ("https://10.2.3.4", "leads to the private address"),
        ("https://169.254.169.254/latest", "leads to the link-local address"),
        ("https://[::1]", "leads to the loopback address ::1"),
        ("https://[::]", "leads to the unspecified address"),
        ("https://[::ffff:127.0.0.1]", "leads to the loopback address"),
        ("https://[::127.0.0.1]", "leads to the translated or tunnelled address"),
        ("https://[fd00::1]", "leads to the private address"),
        ("https://localhost:8000", 'leads to this machine: list "127.0.0.0/8" in allow_networks'),
        ("https://a.LOCALHOST.", "leads to this machine"),
    ],
)
def test_url_that_must_not_be_addressed_is_refused_with_the_fix(tmp_path: Path, url: str, said: str) -> None:
    text = changed("https://crm.example.com/hooks", url)
    (line,) = refusal(tmp_path, text)
    assert line.startswith(f"relay.toml:{line_of(text, 'url =')}: {WEBHOOK_URL}: ")
    assert said in line


def test_address_is_judged_by_what_is_listed(tmp_path: Path) -> None:
    text = changed("allow_networks = []", 'allow_networks = ["10.1.0.0/16"]')
    (line,) = refusal(tmp_path, text.replace("crm.example.com", "10.2.0.1"))
    assert "leads to the private address 10.2.0.1" in line


@pytest.mark.parametrize(
    ("secrets", "said"),
    [
        ("[]", "secrets: is required, or secrets_file: requests are signed"),
        ('[""]', "secrets[0].secret: should be whsec_ followed by"),
        ('["whsec_"]', "holds 0 bytes after whsec_, should hold 24 to 64"),
        (f'["{CANARY}"]', "should be whsec_ followed by"),
        (f'["v1,{SECRET}"]', "should be whsec_ followed by"),
        ('["whsec_' + "ab" * 24 + '!"]', "is not standard base64"),
        ('["whsec_' + base64.b64encode(b"k" * 23).decode() + '"]', "holds 23 bytes"),
        ('["whsec_' + base64.b64encode(b"k" * 65).decode() + '"]', "holds 65 bytes"),
        ('["whsec_' + base64.b64encode(b"k" * 25).decode().rstrip("=") + '"]', "is not standard base64"),
        ('["whsec_' + base64.urlsafe_b64encode(b"\xff" * 24).decode() + '"]', "is not standard base64"),
        (f'["{SECRET} "]', "is not standard base64"),
        ('["whsk_' + base64.b64encode(b"k" * 31).decode() + '"]', "holds 31 bytes after whsk_"),
        ('["whsk_' + base64.b64encode(b"k" * 64).decode() + '"]', "public key after whsk_ that does not belong"),
        (
            f'["{SECRET}", {{secret = "{SECRET}", until = 2027-01-01T00:00:00}}]',
            "secrets[1].until: should have timezone",
        ),
        (f'["{SECRET}", {{secret = "{SECRET}", til = 2027-01-01T00:00:00Z}}]', "til: there is no such setting"),
        ("[{until = 2027-01-01T00:00:00Z}]", "secrets[0].secret: is required"),
        ("[3]", "secrets[0]: should be a table"),
        (f'"{CANARY}"', "secrets: should be a list: ["),
        (json.dumps([SECRET] * 17), "secrets: "),
        (f'["{SECRET}"]\nsecrets_file = "x"', "sinks.crm.secrets_file: excludes secrets: give one of the two"),
    ],
)
def test_wrong_secret_is_refused_without_it(tmp_path: Path, secrets: str, said: str) -> None:
    (line,) = refusal(tmp_path, changed(f'["{SECRET}"]', secrets))
    assert said in line
    assert SECRET.removeprefix("whsec_") not in line
    assert "YWJ" not in line


def test_webhook_without_any_secret_is_refused(tmp_path: Path) -> None:
    (line,) = refusal(tmp_path, changed(f'secrets = ["{SECRET}"]', ""))
    assert line == "relay.toml:10: sinks.crm.secrets: is required, or secrets_file: requests are signed"


@pytest.mark.parametrize(
    ("dsn", "said"),
    [
        ("", "is empty"),
        (" ", "is empty"),
        (CANARY, 'should be "postgresql://'),
        (f"postgres:/u:{CANARY}@h/d", 'should be "postgresql://'),
        (f"postgresql://u:{CANARY}@h/d\\nx", "holds a line break"),
    ],
)
def test_wrong_connection_string_is_refused_without_it(tmp_path: Path, dsn: str, said: str) -> None:
    (line,) = refusal(tmp_path, changed("postgresql://relay@localhost/shop", dsn))
    assert line.startswith(f"relay.toml:3: database.dsn: {said}")


def test_wrong_option_is_named(tmp_path: Path) -> None:
    (line,) = refusal(tmp_path, FILE, dsn=CANARY)
    assert line.startswith('--dsn: database.dsn: should be "postgresql://')


def test_connection_string_and_file_exclude_each_other(tmp_path: Path) -> None:
    (line,) = refusal(tmp_path, changed("[relay]", 'dsn_file = "x"\n[relay]'))
    assert line == "relay.toml:4: database.dsn_file: excludes dsn: give one of the two"


@pytest.mark.parametrize(
    "listen", ["8080", ":8080", "h:", "h:x", "h:65536", "::1:80", "[h]:80", "a/b:1", "a b:1", "[::1]"]
)
def test_wrong_listen_address_is_refused(tmp_path: Path, listen: str) -> None:
    (line,) = refusal(tmp_path, f'[http]\nlisten = "{listen}"')
    assert line.startswith("relay.toml:2: http.listen: should ")


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({"DATABSE__DSN": CANARY}, "there is no such setting; did you mean OUTBOX_RELAY_DATABASE?"),
        ({"DATABASE__DNS": CANARY}, "there is no such setting; did you mean OUTBOX_RELAY_DATABASE__DSN?"),
        ({"SINKS__CRM__SECRTS": CANARY}, "did you mean OUTBOX_RELAY_SINKS__CRM__SECRETS?"),
        ({"SINKS__CRM__RETRY__ATEMPTS": CANARY}, "did you mean OUTBOX_RELAY_SINKS__CRM__RETRY__ATTEMPTS?"),
        ({"SINKS__CRM__TOPIC": CANARY}, "there is no such setting"),
        ({"SINKS__CRM__PRODUCER__ACKS": CANARY}, "there is no such setting"),
        ({"SINKS__EVENTS__PRODUCER__A__B": CANARY}, "there is no such setting"),
        ({"SINKS__CRN__URL": CANARY}, "there is no sink crn, and no OUTBOX_RELAY_SINKS__CRN__TYPE; did you mean crm?"),
        ({"SINKS__CRN__": CANARY}, "there is no sink crn"),
        ({"ROUTES__X": CANARY}, "OUTBOX_RELAY_ROUTES holds the whole table as JSON"),
        ({"ROUTES": CANARY}, "should be a JSON object"),
        ({"ROUTES": f'["{CANARY}"]'}, "should be a JSON object"),
        ({"ROUTES": '{"a": ["crm"], "a": ["events"]}'}, "the same name twice"),
        ({"ROUTES": '{"a": ["crn"]}'}, "routes.a[0]: there is no sink crn; did you mean crm?"),
        ({"ROUTES": '{"a b": ["crm"]}'}, 'routes."a b": matches nothing'),
        ({"ROUTES": "[" * 100_000}, "nested too deeply"),
        ({"ROUTES": "{}", "SINKS__CRM__RETRY": f'"{CANARY}"'}, "should be a JSON object"),
        ({"SINKS__CRM__SECRETS": f'["{CANARY}"'}, "should be a JSON list: Expecting ',' delimiter at character"),
        ({"SINKS__CRM__SECRETS": f'["{CANARY}"]'}, "sinks.crm.secrets[0].secret: should be whsec_"),
        ({"SINKS__CRM__SECRETS": CANARY}, "sinks.crm.secrets[0].secret: should be whsec_"),
        ({"SINKS__CRM__URL": f"https://u:{CANARY}@h"}, "sinks.crm.url: holds credentials"),
        ({"SINKS__CRM__ALLOW_HTTP": CANARY}, "sinks.crm.allow_http: should be a valid boolean"),
        ({"SINKS__EVENTS__TYPE": CANARY}, 'sinks.events.type: should be "kafka" or "webhook" or "python"'),
        ({"SINKS__EVENTS__PRODUCER__ACKS": CANARY}, 'sinks.events.producer.acks: should be "all"'),
        ({"SINKS__EVENTS__PRODUCER__ENABLE_IDEMPOTENCE": "False"}, "should be true or left out"),
        ({"RELAY__LEASE_SECONDS": CANARY}, "relay.lease_seconds: should be a valid number"),
        ({"DATABASE__DSN": CANARY}, 'database.dsn: should be "postgresql://'),
        ({"DATABASE__POOLER": CANARY}, "database.pooler: should be 'none' or 'transaction'"),
    ],
)
def test_wrong_variable_is_named(tmp_path: Path, environ: dict[str, str], said: str) -> None:
    lines = refusal(tmp_path, FILE, {f"OUTBOX_RELAY_{name}": value for name, value in environ.items()})
    name = f"OUTBOX_RELAY_{list(environ)[-1]}"
    assert any(line.startswith(f"{name}: ") and said in line for line in lines), lines


@pytest.mark.parametrize(
    ("misspelt", "right"),
    [
        ("DATABASE_DSN", "DATABASE__DSN"),
        ("DATABASE_DSN_FILE", "DATABASE__DSN_FILE"),
        ("DATABASE__DSN__FILE", "DATABASE__DSN_FILE"),
        ("RELAY_LEASE_SECONDS", "RELAY__LEASE_SECONDS"),
        ("SINKS_CRM_SECRETS", "SINKS__CRM__SECRETS"),
        ("SINKS__CRM_SECRETS", "SINKS__CRM__SECRETS"),
        ("SINKS__CRM_RETRY__ATTEMPTS", "SINKS__CRM__RETRY__ATTEMPTS"),
        ("SINKS_EVENTS_PRODUCER_SASL_PASSWORD", "SINKS__EVENTS__PRODUCER__SASL_PASSWORD"),
    ],
)
def test_variable_with_a_wrong_number_of_underscores_is_named_with_the_right_one(
    tmp_path: Path, misspelt: str, right: str
) -> None:
    assert refusal(tmp_path, FILE, {f"OUTBOX_RELAY_{misspelt}": CANARY}) == [
        f"OUTBOX_RELAY_{misspelt}: there is no such variable; did you mean OUTBOX_RELAY_{right}?"
    ]


def test_misspelt_variable_of_a_sink_that_the_environment_defines_is_named() -> None:
    environ = VALID | {"OUTBOX_RELAY_SINKS_CRM_TIMEOUT_SECONDS": CANARY}
    with pytest.raises(ConfigurationError, match="did you mean OUTBOX_RELAY_SINKS__CRM__TIMEOUT_SECONDS") as refused:
        load(None, environ)
    assert CANARY not in str(refused.value)


@pytest.mark.parametrize(
    ("text", "line", "said"),
    [
        (
            FILE + "[sinks.crm]\nurl = 'x'\n",
            19,
            "the table [sinks.crm] appears twice; each sink needs a name of its own",
        ),
        (FILE + "[relay]\n", 19, "the table [relay] appears twice"),
        (changed("attempts = 12", "attempts = 12\nattempts = 3"), 17, "a name appears twice in one table"),
        (changed("attempts = 12", f"attempts = {CANARY}"), 16, "not valid TOML"),
        (changed("attempts = 12", f'attempts = "{CANARY}'), 16, "not valid TOML"),
        (changed("attempts = 12", f"attempts {CANARY}"), 16, "not valid TOML"),
        (changed("attempts = 12", f"attempts = '{CANARY}' '{CANARY}'"), 16, "not valid TOML"),
        (changed("[sinks.events]", "[sinks.events"), 6, "not valid TOML"),
        (FILE + f'x = ["{CANARY}",', 19, "not valid TOML"),
        (changed("attempts = 12", "attempts = " + "9" * 5000), None, "number"),
        ("x = " + "[" * 100_000, None, "nested too deeply"),
    ],
)
def test_broken_file_is_refused_with_its_line(tmp_path: Path, text: str, line: int | None, said: str) -> None:
    (shown,) = refusal(tmp_path, text)
    where, _, what = shown.partition(": ")
    assert said in what
    assert line is None or where == f"relay.toml:{line}", shown


@pytest.mark.parametrize(
    ("content", "said"),
    [(b"\xff\xfe", "is not a text file in UTF-8"), (b"#" * (4 * 1024 * 1024 + 1), "is larger than")],
)
def test_file_that_is_no_text_is_refused(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "relay.toml"
    path.write_bytes(content)
    with pytest.raises(ConfigurationError, match=said):
        load(path, {})


def test_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"gone\.toml: No such file or directory; name the file with -c"):
        load(tmp_path / "gone.toml", {})
    with pytest.raises(ConfigurationError, match="Is a directory"):
        load(None, {"OUTBOX_RELAY_CONFIG": str(tmp_path)})


def places() -> list[tuple[str, ...]]:
    """Return every setting and table of the models, sinks by the names that they have in the file."""
    found: list[tuple[str, ...]] = []

    def walk(at: tuple[str, ...], model: type[BaseModel]) -> None:
        for name, field in fields(model).items():
            found.append((*at, name))
            if inner := table(field):
                walk((*at, name), inner)

    walk((), Settings)
    walk(("sinks", "events"), SINKS["kafka"])
    walk(("sinks", "crm"), SINKS["webhook"])
    return [*found, ("sinks", "crm"), ("sinks", "events", "producer", "ssl.key.pem")]


PUBLIC = {
    *("name", "topic", "dsn_file", "secrets_file", "forward_headers", "cloudevents_source"),
    *("client_certificate", "client_key", "ca_file", "partition_header", "proxy_authorization_file"),
    *("type_header", "username", "records", "schema_files"),
}
"""Settings that take any text and hide none of it."""
VALID = {
    "OUTBOX_RELAY_SINKS__EVENTS__TYPE": "kafka",
    "OUTBOX_RELAY_SINKS__EVENTS__TOPIC": "shop",
    "OUTBOX_RELAY_SINKS__EVENTS__PRODUCER__BOOTSTRAP_SERVERS": "localhost:9092",
    "OUTBOX_RELAY_SINKS__CRM__TYPE": "webhook",
    "OUTBOX_RELAY_SINKS__CRM__URL": "https://crm.example.com",
    "OUTBOX_RELAY_SINKS__CRM__SECRETS": SECRET,
}
VALUES: list[Any] = [
    CANARY,
    f"postgresql://u:{CANARY}@h\n",
    f"https://u:{CANARY}@h:99999/{CANARY}#{CANARY}",
    f"whsec_{CANARY}",
    [CANARY],
    [[CANARY]],
    [{"secret": CANARY, "until": CANARY}],
    {"secret": CANARY},
    {"x": {"y": [CANARY]}},
    12_345_678_901_234_567_890,
    -1,
    True,
    [],
    {},
]


@pytest.mark.parametrize("path", [path for path in places() if path != ("routes",)], ids=".".join)
def test_no_wrong_value_anywhere_is_repeated(path: tuple[str, ...]) -> None:
    variable = "OUTBOX_RELAY_" + "__".join(path).upper().replace(".", "_")
    for value in VALUES:
        _load_or_refuse({variable: json.dumps(value)}, public=path[-1] in PUBLIC)
        if isinstance(value, str):
            _load_or_refuse({variable: value}, public=path[-1] in PUBLIC)
        if path[:2] == ("sinks", "crm"):
            _load_or_refuse(
                {"OUTBOX_RELAY_SINKS__CRM": json.dumps(_nested(path[2:], value))}, public=path[-1] in PUBLIC
            )


def _nested(path: tuple[str, ...], value: Any) -> Any:
    return {"type": "webhook", path[0]: _nested(path[1:], value)} if path else value


def _load_or_refuse(environ: dict[str, str], *, public: bool = False) -> None:
    try:
        loaded = load(None, VALID | environ)
    except ConfigurationError as refused:
        said = str(refused)
    else:
        said = "" if public else repr(loaded)
    assert CANARY not in said


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["kafka", "webhook"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.text(max_size=5) | st.sampled_from([step for path in places() for step in path]), inner, max_size=4
        )
    ),
    max_leaves=12,
)
NAMES = st.sampled_from(["OUTBOX_RELAY_" + "__".join(path).upper() for path in places()]) | st.text(
    alphabet="_AXC.é ", max_size=8
).map("OUTBOX_RELAY_SINKS__CRM__".__add__)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=300)
@given(st.dictionaries(NAMES, JSON.map(json.dumps) | st.text(max_size=9), max_size=5), st.text(max_size=9))
def test_whatever_the_environment_holds_is_taken_or_refused(environ: dict[str, str], dsn: str) -> None:
    try:
        load(None, environ, dsn)
    except ConfigurationError as refused:
        assert str(refused)  # noqa: PT017 - nearly everything is refused
        assert all(str(refused).splitlines())  # noqa: PT017 - the same


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=200)
@given(st.text(alphabet="[]{}=\"'\n.# ax1,", max_size=40))
def test_whatever_the_file_holds_is_taken_or_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "relay.toml"
    path.write_text(FILE + text, encoding="utf-8")
    try:
        load(path, {})
    except ConfigurationError as refused:
        assert str(refused).startswith(f"{path}:")  # noqa: PT017 - most of it is no TOML
