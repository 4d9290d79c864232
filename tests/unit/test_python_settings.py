"""The table of a Python sink: its defaults, what it refuses by its place, and what it shows."""

from __future__ import annotations

from pathlib import Path

import pytest

from outbox_relay.domain.errors import ConfigurationError
from outbox_relay.service.clients import build_specs
from outbox_relay.settings import PythonSettings, Settings, warnings
from outbox_relay.settings.changes import merged
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
    assert (sink.max_in_flight, sink.timeout_seconds) == (64, 15.0)
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
    f"{HANDLER}max_in_flight = 0": "sinks.mail.max_in_flight",
    f"{HANDLER}max_in_flight = 4097": "sinks.mail.max_in_flight",
    f"{HANDLER}timeout_seconds = 0": "sinks.mail.timeout_seconds",
    f"{HANDLER}timeout_seconds = 3601": "sinks.mail.timeout_seconds",
    f"{HANDLER}timeout_seconds = nan": "sinks.mail.timeout_seconds",
    f"{HANDLER}transaction = true": "sinks.mail.transaction needs dsn",
    f'{HANDLER}dsn = " "\ntransaction = true': "sinks.mail.transaction needs dsn",
    f'{HANDLER}dsn = "{PASSWORD}"': "sinks.mail.dsn",
    f'{HANDLER}cloudevents = "binary"': "sinks.mail.cloudevents has no effect",
    f"{HANDLER}workers = 2": "sinks.mail.workers",
    f'{HANDLER}url = "https://example.com"': "sinks.mail.url",
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


def test_a_dsn_that_is_not_used_is_a_warning(tmp_path: Path) -> None:
    settings = loaded(tmp_path, f"{HANDLER}{DSN}")
    assert any("sinks.mail.dsn" in line and "is not used" in line for line in warnings(settings))


def test_a_relay_may_serve_some_sinks_of_the_file(tmp_path: Path) -> None:
    settings = loaded(tmp_path, f'{HANDLER}[sinks.other]\ntype = "python"\n{HANDLER}')
    assert list(build_specs(settings)) == ["mail", "other"]
    settings.serve_only(["mail"])
    assert list(build_specs(settings)) == list(build_specs(merged(settings, settings))) == ["mail"]
    with pytest.raises(ConfigurationError, match=r"^--sinks: there is no such sink; did you mean mail\?$"):
        settings.serve_only(["mial"])
