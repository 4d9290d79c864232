"""Settings of a Kafka sink other than its topic and its producer."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from outbox_relay.domain.errors import ConfigurationError
from outbox_relay.settings import KafkaSettings, load
from outbox_relay.settings.producer import PROPERTIES

FILE = """
[sinks.events]
type = "kafka"
topic = "shop.{type}"
%s
[sinks.events.producer]
"bootstrap.servers" = "localhost:9092"
%s
[routes]
"*" = ["events"]
"""
TWINS = "OUTBOX_RELAY_SINKS__EVENTS__"


@pytest.fixture
def sink(tmp_path: Path) -> "Loads":
    return Loads(tmp_path)


class Loads:
    """Makes the settings of a sink from lines of its tables and from the environment."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / "relay.toml"

    def __call__(self, *lines: str, producer: str = "", **environ: str) -> KafkaSettings:
        self._path.write_text(FILE % ("\n".join(lines), producer))
        found = load(self._path, {TWINS + name: value for name, value in environ.items()}).sinks["events"]
        assert isinstance(found, KafkaSettings)
        return found


def test_defaults(sink: Loads) -> None:
    found = sink()
    assert (found.partition_header, found.tombstones, found.create_topics) == ("", False, False)
    assert found.parked_max == 100_000
    assert found.producer_files == {}


OAUTH = '"sasl.mechanism" = "OAUTHBEARER"'


@pytest.mark.parametrize("name", ["sasl.mechanism", "sasl.mechanisms"])
def test_the_mechanism_of_java_clients_for_aws_is_refused_with_advice(sink: Loads, name: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"{name}.*AWS_MSK_IAM.*OAUTHBEARER.*token_provider"):
        sink(producer=f'"{name}" = "AWS_MSK_IAM"')


def test_oauthbearer_needs_one_source_of_tokens(sink: Loads) -> None:
    with pytest.raises(ConfigurationError, match=r"token_provider: is required.*oidc"):
        sink(producer=OAUTH)
    with pytest.raises(ConfigurationError, match=r"token_provider: needs .*OAUTHBEARER"):
        sink('token_provider = "shop.msk:token"')
    oidc = f'{OAUTH}\n"sasl.oauthbearer.method" = "oidc"'
    with pytest.raises(ConfigurationError, match=r"token_provider: excludes"):
        sink('token_provider = "shop.msk:token"', producer=oidc)
    assert sink(producer=oidc).token_provider == ""
    assert sink('token_provider = "shop.msk:token"', producer=OAUTH).token_provider == "shop.msk:token"


def test_topics_are_created_as_the_file_says(sink: Loads) -> None:
    found = sink("create_topics = true", "partitions = 12", "replication_factor = 3")
    assert (found.create_topics, found.partitions, found.replication_factor) == (True, 12, 3)


def test_creating_topics_needs_to_know_how(sink: Loads) -> None:
    with pytest.raises(ConfigurationError) as refused:
        sink("create_topics = true")
    said = str(refused.value)
    assert "sinks.events.partitions: is required with create_topics = true" in said
    assert "sinks.events.replication_factor: is required with create_topics = true" in said


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("parked_max = 0", r"parked_max: should be greater than or equal to 1"),
        ("partitions = 0", r"partitions: should be greater than or equal to 1"),
        ("replication_factor = 101", r"replication_factor: should be less than or equal to 100"),
        ('partition_header = "a b"', r"partition_header: should be the name of a header"),
        ('tombstones = "perhaps"', r"tombstones: should be a valid boolean"),
    ],
)
def test_wrong_values_are_refused_at_their_place(sink: Loads, line: str, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        sink(line)


def test_settings_of_the_producer_may_stand_in_files(sink: Loads) -> None:
    found = sink('producer_files = { "sasl.password" = "/run/secrets/kafka" }')
    assert found.producer_files == {"sasl.password": Path("/run/secrets/kafka")}


def test_a_file_has_a_twin_in_the_environment(sink: Loads) -> None:
    found = sink(PRODUCER_FILES__SASL_PASSWORD="/run/secrets/kafka")
    assert found.producer_files == {"sasl.password": Path("/run/secrets/kafka")}


def test_a_password_instead_of_a_path_is_refused_without_being_repeated(sink: Loads) -> None:
    with pytest.raises(
        ConfigurationError, match=r"producer_files.*sasl.password.*should be the path of a file"
    ) as refused:
        sink('producer_files = { "sasl.password" = "hunter2" }')
    assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize("name", ["acks", "enable.idempotence", "transactional.id", "metadata.broker.list", "oauth_cb"])
def test_what_keeps_the_guarantees_may_not_stand_in_a_file(sink: Loads, name: str) -> None:
    with pytest.raises(ConfigurationError, match="should not be in a file"):
        sink(f'producer_files = {{ "{name}" = "/run/x" }}')


def test_a_setting_stands_in_one_place(sink: Loads) -> None:
    with pytest.raises(ConfigurationError, match="is in producer too"):
        sink('producer_files = { "sasl.password" = "/run/x" }', PRODUCER__SASL_PASSWORD="x")


@pytest.mark.parametrize(
    ("misspelt", "right"),
    [
        ("acsk", "acks"),
        ("sasl.pasword", "sasl.password"),
        ("BOOTSTRAP.SERVERS", "bootstrap.servers"),
        ("linger_ms", "linger.ms"),
        ("compression.tpye", "compression.type"),
    ],
)
def test_a_misspelt_setting_of_librdkafka_is_named_with_the_nearest(sink: Loads, misspelt: str, right: str) -> None:
    said = rf"{re.escape(misspelt)}.*: librdkafka has no such setting; did you mean {right}\?"
    with pytest.raises(ConfigurationError, match=rf":8: .*{said}") as refused:
        sink(producer=f'"{misspelt}" = "hunter2"')
    assert "hunter2" not in str(refused.value)
    with pytest.raises(ConfigurationError, match=rf":5: .*{said}") as refused:
        sink(f'producer_files = {{ "{misspelt}" = "/run/hunter2" }}')
    assert "hunter2" not in str(refused.value)


def test_a_misspelt_setting_of_librdkafka_in_the_environment_is_named(sink: Loads) -> None:
    with pytest.raises(ConfigurationError) as refused:
        sink(PRODUCER__ACSK="hunter2")
    assert str(refused.value) == (
        f"{TWINS}PRODUCER__ACSK: sinks.events.producer.acsk: librdkafka has no such setting; did you mean acks?"
    )


def test_a_name_that_librdkafka_knows_and_the_list_lacks_is_handed_on(sink: Loads) -> None:
    assert "test.mock.num.brokers" not in PROPERTIES
    assert sink(producer='"test.mock.num.brokers" = 3').producer["test.mock.num.brokers"] == 3


LISTED = """
import ctypes, re, sys
import confluent_kafka
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
