"""The image, built for real, and its services on the test's database: as its own user, ready, and ended when asked.

Needs root, buildah and what .ci/image built: `make image-test`.
"""

from collections.abc import Generator
from pathlib import Path

import pytest

from outbox_relay import __version__
from tests.packaging import compose, shopping
from tests.packaging.image import Image
from tests.packaging.stack import COMMAND, CONFIG, ENTRYPOINT, Running, Stack
from tests.support.kafka import KafkaBroker
from tests.support.postgres import PostgresServer

pytestmark = [pytest.mark.image, pytest.mark.timeout(400)]

USER = 10001


@pytest.fixture(scope="module")
def image() -> Generator[Image]:
    with Image() as made:
        yield made


def user_of(running: Running) -> set[int]:
    """Return the users that a service's process has, real, effective and saved."""
    status = Path(f"/proc/{running.pid()}/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith("Uid:"))
    return {int(number) for number in line.split()[1:]}


def test_what_the_image_says(image: Image) -> None:
    config = image.config
    assert config["Entrypoint"] == ENTRYPOINT
    assert config["Cmd"] == COMMAND
    assert config["User"] == f"{USER}:{USER}", "a number, so that an orchestrator can tell that it is not root"
    assert config["StopSignal"] == "SIGTERM"
    assert config["Healthcheck"]["Test"][:2] == ["CMD", "bash"]
    variables = {f"OUTBOX_RELAY_CONFIG={CONFIG}", "OUTBOX_RELAY_HTTP__LISTEN=0.0.0.0:8080", "PYTHONUNBUFFERED=1"}
    assert variables <= set(config["Env"])
    assert not [entry for entry in config["Env"] if "PIP_" in entry], "settings of the build"
    assert "8080/tcp" in config["ExposedPorts"]
    assert config["Labels"]["org.opencontainers.image.licenses"] == "Apache-2.0"


def test_what_the_image_holds(image: Image) -> None:
    assert image.shell("outbox-relay --version") == f"outbox-relay {__version__}"
    held = image.shell("ls /opt/outbox-relay/lib/python3*/site-packages; ls /opt/outbox-relay/bin; ls /")
    for tool in ("pip", "setuptools", "hatchling", "src"):
        assert tool not in held.split()
    assert image.shell("for tool in pip pip3 gcc cc make; do command -v $tool || true; done") == ""
    locked = (compose.ROOT / "requirements-relay.lock").read_text()
    versions = image.shell(
        "python3 -c 'from importlib.metadata import distributions as d;"
        " print(*(x.name.lower() + chr(61) * 2 + x.version for x in d()))'"
    )
    brought = [entry for entry in versions.split() if not entry.startswith("outbox-relay==")]
    assert len(brought) > 10
    assert not [entry for entry in brought if entry.replace("_", "-") not in locked.replace("_", "-")]


def test_its_user_can_write_nothing_of_its_own(image: Image) -> None:
    writable = image.shell(
        'find / -xdev -writable ! -type l ! -path "/proc/*" ! -path "/sys/*" ! -path "/dev*" 2>/dev/null || true'
    )
    assert set(writable.split()) <= {"/tmp", "/var/tmp", "/run/lock"}  # noqa: S108 - what Debian gives to everybody


def test_the_services_of_compose_do_their_work(
    image: Image, own_postgres: PostgresServer, kafka: KafkaBroker, tmp_path: Path
) -> None:
    with Stack(image, own_postgres, kafka, tmp_path) as stack:
        shopping.set_up(stack)
        receiver, relay = shopping.open_relay(stack)
        assert user_of(relay) == user_of(receiver) == {USER}
        assert stack.run("relay", *image.config["Healthcheck"]["Test"][1:]).returncode == 0
        shopping.look(stack)
        shopping.trade(stack, receiver, relay)
        shopping.close(stack, receiver, relay)
    written = [path for path in image.root().rglob("*") if path.lstat().st_uid == USER]
    assert written == [], "it works on a root directory that is read only"
