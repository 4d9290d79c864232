"""Settings that are wrong: each is refused by its place, with the fix, without a value that may be secret."""

from __future__ import annotations

import base64
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from outbox_relay.domain.errors import ConfigurationError
from outbox_relay.settings import load
from outbox_relay.settings.producer import PROPERTIES
from outbox_relay.settings.schema import json_schema
from outbox_relay.sinks import types

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
[sinks.events.producer]
"bootstrap.servers" = "localhost:9092"
[sinks.events.registry]
[sinks.crm]
type = "webhook"
url = "https://crm.example.com/hooks"
secrets = ["{SECRET}"]
[sinks.crm.retry]
attempts = 12
[sinks.crm.circuit]
[sinks.mail]
type = "python"
handler = "shop.mail:send"
[schedules.nightly]
cron = "0 3 * * *"
type = "nightly"
[retention]
[notify]
[http]
[routes]
"order.*" = ["events", "crm", "mail"]
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


def having(table: str, text: str) -> str:
    """Return the file with lines in a table, in place of those with the same names."""
    lines, names = FILE.splitlines(), {line.partition(" =")[0] for line in text.splitlines()}
    start = lines.index(f"[{table}]") + 1
    end = next((n for n in range(start, len(lines)) if lines[n].startswith("[")), len(lines))
    kept = [line for line in lines[start:end] if line.partition(" =")[0] not in names]
    return "\n".join([*lines[:start], text, *kept, *lines[end:]]) + "\n"


WRONG = [
    # the table, lines in it, the place below the table, what is said
    ("relay", "lease_second = 15", "lease_second", "there is no such setting; did you mean lease_seconds?"),
    ("relay", "zzz = 15", "zzz", "valid: lease_seconds, name, stop_after_seconds"),
    ("relay", "lease_seconds = 0.5", "lease_seconds", "should be greater than or equal to 1"),
    ("relay", "lease_seconds = nan", "lease_seconds", "should be a finite number"),
    ("relay", "lease_seconds = true", "lease_seconds", "should be a number"),
    ("relay", 'name = "a b"', "name", "should be a label for people"),
    ("database", "dsn = 3", "dsn", "should be a valid string"),
    ("database", f'dsn = "{CANARY}"', "dsn", 'should be "postgresql://'),
    ("database", f'dsn = "postgresql://u:{CANARY}@h/d\\nx"', "dsn", "holds a line break"),
    ("database", 'dsn = " "', "dsn", "is empty"),
    ("database", 'dsn_file = "x"', "dsn_file", "excludes dsn: give one of the two"),
    ("database", f'pooler = "{CANARY}"', "pooler", "should be 'none' or 'transaction'"),
    *[("http", f'listen = "{text}"', "listen", "should ") for text in ("8080", "h:x", "h:65536", "::1:80", "a/b:1")],
    ("retention", 'archive = "s3://u:p@b"', "archive", "should be the path of a directory"),
    ("notify", 'sink = "crn"', "sink", "there is no such sink; did you mean crm?"),
    ("sinks.crm", 'type = "webhok"', "type", 'should be "kafka" or "webhook" or "python"; did you mean webhook?'),
    ("sinks.crm", "type = 3", "type", 'should be "kafka" or "webhook" or "python"'),
    ("sinks.crm", "topic = 'x'", "topic", "there is no such setting"),
    ("sinks.crm", "rety = {}", "rety", "did you mean retry?"),
    ("sinks.crm", 'claim = "row"', "claim", "'log' or 'rows'"),
    ("sinks.crm", 'fair_by = "tenant"', "fair_by", 'needs claim = "rows"'),
    ("sinks.crm", 'order = "key"\nclaim = "rows"', "order", 'give "none", or leave it out'),
    ("sinks.crm", "pending_max = 0", "pending_max", "greater than or equal to 1"),
    ("sinks.crm", "rate_per_second = 0.001", "rate_per_second", "should be 0, for no limit, or at least 0.01"),
    ("sinks.crm", 'cloudevents_source = "a b"', "cloudevents_source", "should be a URI or the path"),
    ("sinks.crm.retry", "attempts = 1.5", "attempts", "should be a valid integer"),
    ("sinks.crm.retry", "atempts = 12", "atempts", "did you mean attempts?"),
    ("sinks.crm.retry", "base_seconds = 7200", "", "max_seconds should not be below base_seconds"),
    ("sinks.crm.circuit", "probe_seconds = 90", "", "probe_max_seconds should not be below probe_seconds"),
    ("sinks.crm", "timeout_seconds = 61", "timeout_seconds", "should be at most 60"),
    ("sinks.crm", 'forward_headers = ["x", "Host"]', "forward_headers[1]", "sets itself"),
    ("sinks.crm", 'forward_headers = ["a b"]', "forward_headers[0]", "should be the name of a header"),
    ("sinks.crm", "permanent_statuses = [400, 399]", "permanent_statuses[1]", "is 399, should be"),
    ("sinks.crm", "accepted_statuses = [503]", "accepted_statuses[0]", "cannot be accepted"),
    ("sinks.crm", "accepted_statuses = [409]\npermanent_statuses = [409]", "permanent_statuses", "which accepted_"),
    ("sinks.crm", 'client_key = "k.pem"', "client_key", "needs client_certificate"),
    ("sinks.crm", f'proxy = "https://{CANARY}:3128"', "proxy", "should be http://HOST:PORT"),
    ("sinks.crm", f'proxy = "http://u:{CANARY}@egress"', "proxy", "has no port: write http://HOST:PORT"),
    ("sinks.crm", 'proxy = { path = "x" }', "proxy", "should be text, or a table"),
    ("sinks.crm", 'allow_networks = ["10.1.0.1/16"]', "allow_networks[0]", 'is "10.1.0.0/16"'),
    ("sinks.crm", 'allow_networks = ["lan"]', "allow_networks[0]", "should be a network such as"),
    ("sinks.crm", f'secrets = ["{SECRET}", "{CANARY}"]', "secrets[1].secret", "should be whsec_ followed by"),
    ("sinks.crm", f'secrets = [{{ file = "x", env = "{CANARY}" }}]', "secrets[0].secret", "should be text, or a table"),
    ("sinks.crm", f'secrets = [{{ secret = "{SECRET}", until = 2027-01-01T00:00:00 }}]', "secrets[0].until", "time"),
    ("sinks.crm", "secrets = []", "secrets", "has 0 secrets, should have 1 to 16"),
    *[
        ("sinks.crm", f"headers = {headers}", f"headers.{place}", said)
        for headers, place, said in [
            (
                "{ Webhook-Signature = 'v1,x' }",
                "Webhook-Signature",
                "is a header that the relay or",
            ),
            ('{ "x\\r\\ny" = "x" }', '"x\\r\\ny"', "should be the name of a header"),
            (f"{{ {'x' * 129} = 'x' }}", '"' + "x" * 80 + '…"', "should be the name of a header"),
            ("{ x-a = '1', X-A = '2' }", "X-A", "appears twice"),
            (f'{{ x-a = "{CANARY}\\r\\nx-b: 1" }}', "x-a", "should hold visible ASCII characters"),
            (f'{{ x-a = "{CANARY * 400}" }}', "x-a", "holds more than 4096 bytes"),
            (f"{{ x-a = {{ evn = '{CANARY}' }} }}", "x-a", 'should be text, or a table { file = "PATH" } or { env'),
            (f"{{ x-a = {{ text = '{CANARY}' }} }}", "x-a", "should be text, or a table"),
        ]
    ],
    ("sinks.crm", 'forward_headers = ["x-a"]\nheaders = { X-A = "t" }', "headers.X-A", "is in forward_headers too"),
    ("sinks.events", 'topic = "shop.{typ}"', "topic", "position 6: unknown field {typ}; fields are {type}, {key}"),
    ("sinks.events", 'topic = "__{type}"', "topic", "begins with __, as Kafka's internal topics do"),
    ("sinks.events", 'topic = "a"\ntopics = ["b.*"]', "topics", "does not allow the topic of this sink"),
    ("sinks.events", 'topics = ["b.*", "sho"]', "topics", "does not allow any topic"),
    ("sinks.events", 'topics = ["a b"]', "topics[0]", "should be the name of a topic, with *"),
    ("sinks.events", 'type_header = "a b"', "type_header", "should be the name of a header"),
    ("sinks.events", "create_topics = { partitions = 6 }", "create_topics.replication_factor", "is required"),
    ("sinks.events", "max_in_flight_total = 5", "max_in_flight_total", "has no meaning for Kafka"),
    ("sinks.events", 'token_provider = "shop.msk:token"', "token_provider", 'needs "sasl.mechanism"'),
    ("sinks.events.producer", '"sasl.mechanism" = "AWS_MSK_IAM"', '"sasl.mechanism"', "token_provider"),
    ("sinks.events.producer", f'acsk = "{CANARY}"', "acsk", "librdkafka has no such setting; did you mean acks?"),
    ("sinks.events.producer", "bootstrap.servers = 'x'", "bootstrap", 'needs quotes: "bootstrap.…"'),
    ("sinks.events.producer", '"bootstrap.servers" = " "', "", 'needs "bootstrap.servers"'),
    ("sinks.events.producer", 'acks = { file = "/x" }', "acks", "is no secret: write its value here"),
    ("sinks.events.producer", '"batch.size" = "big"', '"batch.size"', "should be a whole number"),
    ("sinks.events.registry", 'url = "https://r.internal"', "format", "is required with url"),
    ("sinks.events.registry", 'format = "avro"', "format", "needs url"),
    ("sinks.events.registry", f'url = "https://u:{CANARY}@a.internal"', "url", "should hold no credentials"),
    ("sinks.events.registry", f'user_info = "{CANARY}"', "user_info", 'should be "USER:PASSWORD"'),
    ("sinks.events.registry", 'records = { a = "not a name" }', "records.a", "should be the full name of a record"),
    ("sinks.mail", 'handler = "shop.mail"', "handler", 'should be "MODULE:FUNCTION", such as "shop.mail:send"'),
    ("sinks.mail", "transaction = true", "transaction", "needs dsn"),
    ("sinks.mail", 'cloudevents = "binary"', "cloudevents", "has no effect: a handler gets the event itself"),
    ("schedules.nightly", 'cron = "0 25 * * *"', "cron", ""),
    ("schedules.nightly", 'timezone = "Mars"', "timezone", ""),
    ("schedules.nightly", 'type = "outbox.x"', "type", "are the relay's own"),
    ("schedules.nightly", "payload = { a = { at = 2027-01-01 } }", "payload.a.at", "JSON has no dates and times"),
    ("schedules.nightly", "payload = 3", "payload", "should be a table"),
    ("schedules.nightly", 'key = "a\\u0000"', "key", "PostgreSQL cannot store"),
    ("routes", '"order.*" = ["event"]', '"order.*"[0]', "there is no sink event; did you mean events?"),
    ("routes", '"order.*" = "events"', '"order.*"', "a list of one or more names of sinks"),
    ("routes", '"order *" = ["crm"]', '"order *"', "matches nothing"),
    ("routes", '"outbox.*" = ["crm"]', '"outbox.*"', "are notices: set sink in [notify]"),
]


@pytest.mark.parametrize(("table", "text", "place", "said"), WRONG, ids=[f"{row[0]}:{row[1][:30]}" for row in WRONG])
def test_wrong_value_is_refused_with_its_place_and_the_fix(
    tmp_path: Path, table: str, text: str, place: str, said: str
) -> None:
    (line,) = refusal(tmp_path, having(table, text))
    at = f"{table}.{place}".rstrip(".")
    assert re.match(rf"relay\.toml:\d+: {re.escape(at)}: ", line), line
    assert said in line


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("[database]", "[databse]", "databse: there is no such setting; did you mean database?"),
        ("[sinks.mail]", "[sinks.Mail]", "sinks.Mail: a sink's name is 1 to 40 of a-z, 0-9 and _"),
        ("[sinks.mail]", "[sinks.m__l]", "holds no __"),
        ('type = "python"', "", 'sinks.mail.type: is required: "kafka" or "webhook" or "python"'),
        ('topic = "shop.{type}"', "", "sinks.events.topic: is required"),
        (f'secrets = ["{SECRET}"]', "", "sinks.crm.secrets: is required"),
    ],
)
def test_wrong_or_missing_name_is_refused(tmp_path: Path, old: str, new: str, said: str) -> None:
    assert any(said in line for line in refusal(tmp_path, FILE.replace(old, new)))


def test_every_problem_is_listed_at_once_with_its_line(tmp_path: Path) -> None:
    text = having("sinks.crm", f'secrets = [\n  "{SECRET}",\n  "{CANARY}",\n]')
    text = text.replace("attempts = 12", "attempts = 0").replace('"shop.{type}"', "'shop.{typ}'")
    text = text.replace('"mail"]', '"male"]')
    text = text.replace("lease_seconds", "lease")
    environ = {
        "OUTBOX_RELAY_SINKS__CRM__URI": "x",
        "OUTBOX_RELAY_HTTP__LISTEN": "x",
        "OUTBOX_RELAY_DATABSE__DSN": CANARY,
    }
    lines = text.splitlines()
    topic = lines.index("topic = 'shop.{typ}'") + 1
    expected = {
        f"relay.toml:{lines.index('lease = 15') + 1}: relay.lease",
        f"relay.toml:{lines.index('attempts = 0') + 1}: sinks.crm.retry.attempts",
        f"relay.toml:{lines.index('secrets = [') + 1}: sinks.crm.secrets[1].secret",
        f"relay.toml:{topic}: sinks.events.topic",
        f'relay.toml:{len(lines)}: routes."order.*"[2]',
        "OUTBOX_RELAY_SINKS__CRM__URI: sinks.crm.uri",
        "OUTBOX_RELAY_HTTP__LISTEN: http.listen",
        "OUTBOX_RELAY_DATABSE__DSN: databse.dsn",
    }
    found = refusal(tmp_path, text, environ)
    assert {": ".join(line.split(": ")[:2]) for line in found} == expected
    assert len(found) == len(expected)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("enable.idempotence", '"false"'),
        ("enable.gapless.guarantee", "false"),
        ("request.required.acks", '"leader"'),
        ("delivery.timeout.ms", "1"),
        ("max.in.flight", "5"),
        ("message.send.max.retries", "0"),
        ("transactional.id", f'"{CANARY}"'),
        ("partitioner", '"random"'),
        ("delivery.report.only.error", "true"),
        ("queuing.strategy", '"lifo"'),
        ("oauth_cb", '"f"'),
    ],
)
def test_producer_setting_that_undoes_a_guarantee_is_refused_with_the_reason(
    tmp_path: Path, setting: str, value: str
) -> None:
    (line,) = refusal(tmp_path, having("sinks.events.producer", f'"{setting}" = {value}'))
    assert re.search(r"sinks\.events\.producer\..*: should .*: \w+ \w+", line), line


def test_a_name_that_librdkafka_knows_and_the_list_lacks_is_handed_on(tmp_path: Path) -> None:
    path = tmp_path / "relay.toml"
    path.write_text(having("sinks.events.producer", '"test.mock.num.brokers" = 3'))
    assert "test.mock.num.brokers" not in PROPERTIES
    assert load(path, {}).sinks


LISTED = """
import ctypes, re, confluent_kafka
libc, library = ctypes.CDLL(None), ctypes.CDLL(re.search(r"/\\S*librdkafka\\S*", open("/proc/self/maps").read())[0])
libc.fdopen.restype = ctypes.c_void_p
stream = ctypes.c_void_p(libc.fdopen(1, b"w"))
library.rd_kafka_conf_properties_show(stream)
libc.fclose(stream)
"""


@pytest.mark.processes
def test_the_list_has_every_setting_of_the_installed_librdkafka() -> None:
    """The library itself prints its table; only settings of functions have an underscore in the name."""
    table = subprocess.run([sys.executable, "-c", LISTED], capture_output=True, text=True, check=True).stdout
    names = set(re.findall(r"^([a-z][\w.]*) +\| ", table, re.MULTILINE))
    functions = {name for name in names if "_" in name and name != "log_level"}
    assert names - functions - {"opaque", "interceptors"} == PROPERTIES


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("http://crm.example.com", "plain http is refused: use https, or set allow_http = true"),
        ("javascript:alert(1)", "should begin with https://"),
        ("https://h/" + "a" * 2048, "should be a URL of 1 to 2048 characters"),
        (f"https://user:{CANARY}@crm.example.com", "holds credentials"),
        ("https://@crm.example.com", "holds credentials"),
        (f"https://crm.example.com/#{CANARY}", "holds a fragment"),
        ("https:crm.example.com", "has no host"),
        ("https://:443/", "has no host"),
        *[(f"https://h.example:{port}/", "has a wrong port") for port in ("0", "99999", "-1", "x", "", "+80")],
        ("https://h.example/a\\tb", "holds a space, a control character"),
        ("http://127.0.0.1:p\\\\@evil/", "a backslash"),
        ("https://bücher.example", "a letter beyond ASCII"),
        ("https://\uff11\uff12\uff17.0.0.1", "a letter beyond ASCII"),
        ("https://a..b", "has a host that is no name"),
        ("https://h%00.example", "has a host that is no name"),
        ("https://[::1", "is no IPv6 address"),
        ("https://a[::1]/", "no"),
        ("https://[fe80::1%25eth0]/", "has an address with a zone"),
        *[
            (f"https://{host}/", "neither a name nor an address")
            for host in ("127.1", "2130706433", "0x7f.1", "0177.0.0.1", "0", "1.2.3.4.5", "a.0x1")
        ],
        ("https://127.0.0.1./", "leads to the loopback address"),
        ("https://10.2.3.4", "leads to the private address 10.2.3.4: list its network in allow_networks"),
        ("https://169.254.169.254/latest", "leads to the link-local address"),
        ("https://[::ffff:127.0.0.1]", "leads to the loopback address"),
        ("https://[::127.0.0.1]", "leads to the translated or tunnelled address"),
        ("https://a.LOCALHOST.", 'leads to this machine: list "127.0.0.0/8" in allow_networks'),
    ],
)
def test_url_that_must_not_be_addressed_is_refused_with_the_fix(tmp_path: Path, url: str, said: str) -> None:
    (line,) = refusal(tmp_path, having("sinks.crm", f'url = "{url}"'))
    assert ": sinks.crm.url: " in line
    assert said in line


@pytest.mark.parametrize(
    ("table", "text", "url", "service"),
    [
        ("http", 'listen = "0.0.0.0:8080"', "https://127.0.0.1:8080", "HTTP port"),
        ("database", 'dsn = "host=db.example port=443"', "https://DB.example.", "database"),
        ("database", 'listen_dsn = "postgresql://direct.example:6432/x"', "https://direct.example:6432", "database"),
    ],
)
def test_url_of_the_relays_own_services_is_refused(
    tmp_path: Path, table: str, text: str, url: str, service: str
) -> None:
    crm = f'url = "{url}"\nallow_networks = ["127.0.0.0/8"]\n'
    wrong = having(table, text).replace('url = "https://crm.example.com/hooks"\n', crm)
    (line,) = refusal(tmp_path, wrong)
    assert f": sinks.crm.url: leads to the relay's own {service}" in line


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("DATABASE__DNS", CANARY, "there is no such setting; did you mean dsn?"),
        ("SINKS__CRM__RETRY__ATEMPTS", CANARY, "did you mean attempts?"),
        ("SINKS__CRM__PRODUCER__ACKS", CANARY, "there is no such setting"),
        ("SINKS__CRN__URL", CANARY, "sinks.crn.type: is required"),
        ("ROUTES__X", CANARY, "routes.x: should be a list"),
        ("ROUTES", CANARY, "should be a table of lists"),
        ("ROUTES", '{"a": ["crn"]}', "routes.a[0]: there is no sink crn; did you mean crm?"),
        ("ROUTES", "[" * 100_000, "should be a table of lists"),
        ("SINKS__CRM__SECRETS", f'["{CANARY}"', "sinks.crm.secrets[0].secret: should be whsec_"),
        ("SINKS__CRM__ALLOW_HTTP", CANARY, "sinks.crm.allow_http: should be a valid boolean"),
        ("SINKS__EVENTS__PRODUCER__ENABLE_IDEMPOTENCE", "False", "should be true or left out"),
        ("SINKS__EVENTS__PRODUCER__ACSK", CANARY, "librdkafka has no such setting; did you mean acks?"),
        ("RELAY__LEASE_SECONDS", CANARY, "relay.lease_seconds: should be a valid number"),
        ("DATABASE__DSN", CANARY, 'database.dsn: should be "postgresql://'),
    ],
)
def test_wrong_variable_is_named(tmp_path: Path, name: str, value: str, said: str) -> None:
    lines = refusal(tmp_path, FILE, {f"OUTBOX_RELAY_{name}": value})
    assert any(line.startswith(f"OUTBOX_RELAY_{name}: ") and said in line for line in lines), lines


def test_wrong_option_and_wrong_database_url_are_named(tmp_path: Path) -> None:
    assert refusal(tmp_path, FILE, dsn=CANARY)[0].startswith('--dsn: database.dsn: should be "postgresql://')
    (line,) = refusal(tmp_path, "", {"DATABASE_URL": CANARY})
    assert line.startswith('DATABASE_URL: database.dsn: should be "postgresql://')


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (FILE + "[relay]\n", FILE.count("\n") + 1),
        (having("relay", "lease_seconds = 1\nlease_seconds = 3"), 6),
        (having("relay", f"lease_seconds = {CANARY}"), 5),
        (having("relay", f'name = "{CANARY}'), 5),
        ("x = " + "9" * 5000, None),
        ("x = " + "[" * 100_000, None),
    ],
)
def test_broken_file_is_refused_with_its_line(tmp_path: Path, text: str, line: int | None) -> None:
    (shown,) = refusal(tmp_path, text)
    assert line is None or shown.startswith(f"relay.toml:{line}: not valid TOML: "), shown


@pytest.mark.parametrize("content", [b"\xff\xfe", b"#" * (4 * 1024 * 1024 + 1), None])
def test_file_that_cannot_be_read_is_named(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "relay.toml"
    path.mkdir() if content is None else path.write_bytes(content)
    for named in (path, tmp_path / "gone.toml"):
        with pytest.raises(ConfigurationError, match=rf"{named}: .*; name the file with -c"):
            load(named, {})


# -- whatever is given ------------------------------------------------------------------------------------------------


def places() -> list[str]:
    """Return the variables of all settings."""
    sinks = {"KafkaSettings": "SINKS__EVENTS", "WebhookSettings": "SINKS__CRM", "PythonSettings": "SINKS__MAIL"}
    parts = {"RegistrySettings": "SINKS__EVENTS__REGISTRY", "RetryPolicy": "SINKS__CRM__RETRY"}
    parts |= {"CircuitPolicy": "SINKS__CRM__CIRCUIT", "ScheduleSettings": "SCHEDULES__NIGHTLY"}
    found = ["ROUTES", "SINKS__CRM", "SINKS__EVENTS__PRODUCER__SSL_KEY_PEM"]
    for name, table in json_schema()["$defs"].items():
        at = (sinks | parts).get(name, name.removesuffix("Settings").upper())
        found += [f"{at}__{setting.upper()}" for setting in table.get("properties", {})]
    return [f"OUTBOX_RELAY_{name}" for name in found]


PUBLIC = (
    *("NAME", "TOPIC", "DSN_FILE", "FORWARD_HEADERS", "SOURCE", "CERTIFICATE", "CLIENT_KEY", "CA_FILE"),
    *("_HEADER", "RECORDS", "__KEY", "NIGHTLY__TYPE", "FILE", "TOPICS"),
)
"""Ends of the names of settings that take any text and hide none of it."""
VALUES: list[Any] = [
    *(
        f"https://u:{CANARY}@h:99999/{CANARY}#{CANARY}",
        f"whsec_{CANARY}",
        [CANARY],
        [{"secret": CANARY, "until": CANARY}],
    ),
    {"x": {"y": [CANARY]}},
]


@pytest.mark.parametrize("name", places())
def test_no_wrong_value_anywhere_is_repeated(tmp_path: Path, name: str) -> None:
    path = tmp_path / "relay.toml"
    path.write_text(FILE)
    for value in VALUES:
        try:
            found = load(path, {name: value if isinstance(value, str) else json.dumps(value)})
            said = "" if name.endswith(PUBLIC) else repr(found)
        except ConfigurationError as refused:
            said = str(refused)
        assert CANARY not in said


JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(max_size=5) | st.sampled_from(["kafka", "webhook"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["type", "url", "x"]), inner),
    max_leaves=8,
)
NAMES = st.sampled_from(places()) | st.text(alphabet="_AXC.é ", max_size=8).map("OUTBOX_RELAY_SINKS__CRM__".__add__)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50)
@given(st.dictionaries(NAMES, JSON.map(json.dumps) | st.text(max_size=9), max_size=5), st.text(max_size=9))
def test_whatever_the_environment_holds_is_taken_or_refused(environ: dict[str, str], dsn: str) -> None:
    try:
        load(None, environ, dsn)
    except ConfigurationError as refused:
        assert all(str(refused).splitlines())  # noqa: PT017 - nearly everything is refused


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50)
@given(st.text(alphabet="[]{}=\"'\n.# ax1,", max_size=40))
def test_whatever_the_file_holds_is_taken_or_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "relay.toml"
    path.write_text(FILE + text, encoding="utf-8")
    try:
        load(path, {})
    except ConfigurationError as refused:
        assert str(refused).startswith(f"{path}:")  # noqa: PT017 - most of it is no TOML
