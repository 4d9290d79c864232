"""The table of a Python sink: its defaults, what it refuses by its place, what it shows, and what its workers get."""

from __future__ import annotations

from pathlib import Path

import pytest

from outbox_relay.domain.errors import ConfigurationError
from outbox_relay.service.python_sinks import python_sink, worker_environment
from outbox_relay.settings import PythonSettings, Settings, remade_sinks, warnings
from outbox_relay.settings.effective import shown
from tests.support.settings_file import load_text

FILE = """
[database]
dsn = "postgresql://relay@localhost/shop"
[sinks.mail]
type = "python"
{lines}
[routes]
"*" = ["mail"]
"""
HANDLER = 'handler = "shop.mail:send"\n'
PASSWORD = "pa55word"
DSN = f'dsn = "postgresql://shop:{PASSWORD}@localhost/shop"\n'


def loaded(place: Path, lines: str) -> Settings:
    return load_text(place, FILE.format(lines=lines))


def mail(settings: Settings) -> PythonSettings:
    sink = settings.sinks["mail"]
    assert isinstance(sink, PythonSettings)
    return sink


def refused(place: Path, lines: str) -> str:
    with pytest.raises(ConfigurationError) as found:
        loaded(place, lines)
    return str(found.value)


def test_the_defaults(tmp_path: Path) -> None:
    sink = mail(loaded(tmp_path, HANDLER))
    assert (sink.workers, sink.max_in_flight, sink.timeout_seconds, sink.max_memory_mb) == (1, 64, 15.0, 512)
    assert (sink.transaction, sink.dsn, sink.order) == (False, None, "key")


FORM = 'sinks.mail.handler should be "MODULE:FUNCTION", such as "shop.mail:send"'
REFUSED = {
    'handler = "shop.mail"': FORM,
    'handler = "shop.mail:"': FORM,
    'handler = ":send"': FORM,
    'handler = "shop..mail:send"': FORM,
    'handler = "shop.mail:send()"': FORM,
    'handler = "shop.mail:send:more"': FORM,
    'handler = "../shop:send"': FORM,
    'handler = ""': FORM,
    "handler = 5": "sinks.mail.handler",
    "": "sinks.mail.handler is required",
    f'handler = "{"a" * 255}:b"': "sinks.mail.handler",
    f"{HANDLER}workers = 0": "sinks.mail.workers",
    f"{HANDLER}workers = 65": "sinks.mail.workers",
    f"{HANDLER}workers = true": "sinks.mail.workers should be a number",
    f"{HANDLER}max_in_flight = 2\nworkers = 3": "sinks.mail.workers is 3, should not be above max_in_flight",
    f"{HANDLER}max_in_flight = 0": "sinks.mail.max_in_flight",
    f"{HANDLER}max_in_flight = 4097": "sinks.mail.max_in_flight",
    f"{HANDLER}timeout_seconds = 0": "sinks.mail.timeout_seconds",
    f"{HANDLER}timeout_seconds = 3601": "sinks.mail.timeout_seconds",
    f"{HANDLER}timeout_seconds = nan": "sinks.mail.timeout_seconds",
    f"{HANDLER}max_memory_mb = 63": "sinks.mail.max_memory_mb should be 0, for no limit, or at least 64",
    f"{HANDLER}max_memory_mb = -1": "sinks.mail.max_memory_mb",
    f"{HANDLER}transaction = true": "sinks.mail.transaction needs dsn",
    f'{HANDLER}dsn = " "\ntransaction = true': "sinks.mail.transaction needs dsn",
    f'{HANDLER}dsn = "{PASSWORD}"': "sinks.mail.dsn",
    f'{HANDLER}cloudevents = "binary"': "sinks.mail.cloudevents has no effect",
    f'{HANDLER}url = "https://example.com"': "sinks.mail.url",
    f"{HANDLER}worker = 2": "workers",
}


@pytest.mark.parametrize("lines", REFUSED)
def test_what_is_wrong_is_refused_with_its_place_and_without_its_secrets(tmp_path: Path, lines: str) -> None:
    said = refused(tmp_path, lines)
    place, _, rest = REFUSED[lines].partition(" ")
    assert place in said
    assert rest in said
    assert PASSWORD not in said


def test_a_dsn_is_shown_nowhere_with_its_password(tmp_path: Path) -> None:
    settings = loaded(tmp_path, f"{HANDLER}{DSN}transaction = true")
    assert PASSWORD not in f"{settings!r}{mail(settings)!r}{shown(settings)}{warnings(settings)}"
    sink = python_sink("mail", settings, mail(settings))
    assert PASSWORD not in f"{sink!r}{sink._task!r}"  # pyright: ignore[reportPrivateUsage]
    assert sink._task.dsn.count(PASSWORD) == 1  # pyright: ignore[reportPrivateUsage]


def test_a_dsn_that_is_not_used_reaches_no_worker_and_is_a_warning(tmp_path: Path) -> None:
    settings = loaded(tmp_path, f"{HANDLER}{DSN}")
    assert python_sink("mail", settings, mail(settings))._task.dsn == ""  # pyright: ignore[reportPrivateUsage]
    assert any("sinks.mail.dsn" in line and "is not used" in line for line in warnings(settings))


@pytest.mark.parametrize(
    "line", ['handler = "shop.mail:other"', f"{HANDLER}workers = 2", f"{HANDLER}max_memory_mb = 0"]
)
def test_a_reload_makes_the_sink_again(tmp_path: Path, line: str) -> None:
    assert [*remade_sinks(loaded(tmp_path, HANDLER), loaded(tmp_path, line))] == ["mail"]


def test_threads_and_memory_of_a_worker(tmp_path: Path) -> None:
    settings = loaded(tmp_path, f"{HANDLER}max_in_flight = 500\nworkers = 5\nmax_memory_mb = 0")
    task = python_sink("mail", settings, mail(settings))._task  # pyright: ignore[reportPrivateUsage]
    assert (task.threads, task.memory_mb, task.replay) == (64, None, None)
    task = python_sink("mail", settings, mail(settings), replay=7, slots=16)._task  # pyright: ignore[reportPrivateUsage]
    assert (task.threads, task.replay) == (16, 7)


def test_no_variable_with_a_setting_of_the_relay_reaches_a_worker(tmp_path: Path) -> None:
    environ = {"OUTBOX_RELAY_SINKS__MAIL__DSN": PASSWORD, "PGPASSWORD": PASSWORD, "PGPASSFILE": "x", "HOME": "/"}
    assert worker_environment(loaded(tmp_path, HANDLER), environ) == {"HOME": "/"}
