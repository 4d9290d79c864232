"""The types of sinks: what is found, what is refused, and what no message repeats."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path
from pkgutil import resolve_name

import pytest

from outbox_relay import settings
from outbox_relay.domain.errors import ConfigurationError
from outbox_relay.settings import Settings
from outbox_relay.settings.effective import recorded, shown
from outbox_relay.sinks import types
from tests.support.command import Ended, inside
from tests.support.plugin_package import on_path, write_plugin

ROOT = Path(__file__).parents[2]
CANARY = "canary-7f3a91"


@pytest.fixture
def packages(tmp_path: Path) -> Generator[Path]:
    directory = tmp_path / "packages"
    directory.mkdir()
    with on_path(directory):
        yield directory


def config(tmp_path: Path, kind: str, *lines: str) -> Path:
    """Write a configuration with one sink of the type `kind`."""
    path = tmp_path / "relay.toml"
    table = [f'[sinks.crm]\ntype = "{kind}"', *lines]
    path.write_text("\n".join(['[database]\ndsn = "postgresql://u@localhost/d"\n[routes]\n"*" = ["crm"]', *table, ""]))
    path.chmod(0o600)
    return path


def load(tmp_path: Path, kind: str, *lines: str, **environ: str) -> Settings:
    return settings.load(config(tmp_path, kind, *lines), environ)


def refusal(tmp_path: Path, kind: str, *lines: str, **environ: str) -> str:
    with pytest.raises(ConfigurationError) as refused:
        load(tmp_path, kind, *lines, **environ)
    return str(refused.value)


def check(tmp_path: Path, kind: str, *lines: str) -> Ended:
    """Run `check` on a configuration with one sink."""
    return inside("check", "-c", config(tmp_path, kind, *lines))


@pytest.mark.parametrize("kind", types.BUILTIN)
def test_a_builtin_type_has_a_model_and_a_maker(kind: str) -> None:
    assert types.sink_type(kind) is types.sink_type(kind)
    assert callable(resolve_name(types.BUILTIN[kind][1]))


def test_an_unknown_type_is_answered_with_the_nearest_name_and_the_installed_plugins(
    tmp_path: Path, packages: Path
) -> None:
    none = 'should be "kafka" or "webhook" or "python"; valid: kafka, python, webhook; no plug-in is installed'
    assert refusal(tmp_path, "natz").endswith(f"sinks.crm.type: {none}")
    write_plugin(packages, "nats")
    text = 'should be "kafka" or "webhook" or "python", or a plug-in: "nats" of plugin-nats 1.0; did you mean nats?'
    assert text in refusal(tmp_path, "natz")


def test_a_plugin_is_imported_only_if_a_file_names_its_type(tmp_path: Path, packages: Path) -> None:
    write_plugin(packages, "nats", f"Path({str(tmp_path / 'imported')!r}).touch()")
    load(tmp_path, "python", 'handler = "a:b"')
    assert refusal(tmp_path, "natz")
    assert not (tmp_path / "imported").exists()
    load(tmp_path, "nats")
    assert (tmp_path / "imported").exists()


def test_a_package_does_not_replace_a_type_of_the_relay(tmp_path: Path, packages: Path) -> None:
    write_plugin(packages, "python", f"Path({str(tmp_path / 'imported')!r}).touch()")
    assert type(load(tmp_path, "python", 'handler = "a:b"').sinks["crm"]) is settings.PythonSettings
    assert not (tmp_path / "imported").exists()
    assert types.plugins() == {}


MISFITS = {
    "no module": (
        "raise ImportError('no module named natz')",
        "Good",
        "raised ImportError at packages/plugin_nats.py:33: no module named natz",
    ),
    "raises": (
        f"raise RuntimeError({CANARY!r})",
        "Good",
        "cannot be imported: plugin_nats:Good raised RuntimeError at ",
    ),
    "no class": ("thing = 3", "thing", "does not fit: its entry point names no class"),
    "no version": ("class A(Good): API_VERSION = None", "A", "has no API_VERSION, a number; this relay has 1"),
    "newer": ("class A(Good): API_VERSION = 2", "A", "written for version 2 of the interface, and this relay has 1"),
    "older": ("class A(Good): API_VERSION = 0", "A", "this relay has 1: upgrade the plug-in"),
    "no model": ("class A(Good): Settings = BaseModel", "A", "A.Settings is no model that extends PluginSettings"),
}


@pytest.mark.parametrize(("code", "name", "said"), MISFITS.values(), ids=MISFITS.keys())
def test_a_plugin_that_does_not_fit_is_refused_in_one_sentence(
    tmp_path: Path, packages: Path, code: str, name: str, said: str
) -> None:
    write_plugin(packages, "nats", code, name)
    ended = check(tmp_path, "nats")
    assert (ended.code, ended.out) == (2, "")
    assert 'relay.toml:6: sinks.crm.type: the plug-in "nats" of plugin-nats 1.0 ' in ended.err
    assert said in ended.err
    assert len(ended.err.splitlines()) == 1
    assert CANARY not in ended.err


UNMADE = {
    "raises": ("class A(Good):\n    def __init__(self, s, c): raise KeyError(s.note)", "cannot be made: KeyError at "),
    "signature": ("class A(Good):\n    def __init__(self): ...", "cannot be made: TypeError"),
}


@pytest.mark.parametrize(("code", "said"), UNMADE.values(), ids=UNMADE.keys())
def test_a_plugin_that_cannot_be_made_is_refused_by_check(tmp_path: Path, packages: Path, code: str, said: str) -> None:
    write_plugin(packages, "nats", code, "A")
    ended = check(tmp_path, "nats", f'note = "{CANARY}"')
    assert (ended.code, ended.out) == (2, "")
    assert 'relay.toml:5: sinks.crm: the plug-in "nats" of plugin-nats 1.0 ' in ended.err
    assert said in ended.err
    assert CANARY not in ended.err


def test_a_type_of_several_packages_is_refused(tmp_path: Path, packages: Path) -> None:
    write_plugin(packages, "nats", package="one")
    write_plugin(packages, "nats", package="two")
    said = 'several packages have a plug-in "nats": one 1.0 and two 1.0; uninstall all but one'
    assert said in refusal(tmp_path, "nats")


def test_a_plugin_that_was_mended_is_found_at_the_next_reading(tmp_path: Path, packages: Path) -> None:
    write_plugin(packages, "nats", "raise RuntimeError")
    assert refusal(tmp_path, "nats")
    write_plugin(packages, "nats", "mended = True")
    assert load(tmp_path, "nats").sinks["crm"].type == "nats"


def test_what_a_plugin_prints_at_its_import_is_no_data(tmp_path: Path, packages: Path) -> None:
    write_plugin(packages, "nats", "print('hello')")
    ended = inside("config", "show", "--json", "-c", config(tmp_path, "nats"))
    assert ended.code == 0
    assert json.loads(ended.out)
    assert "hello" in ended.err


REFUSED = {
    "unknown": (["nots = 'x'"], "sinks.crm.nots: there is no such setting; did you mean note?"),
    "number": (["size = 11"], "sinks.crm.size: should be less than or equal to 10"),
    "choice": (["mode = 'canary-7f3a91'"], "sinks.crm.mode: should be 'fast' or 'slow'"),
    "list": (["names = 'canary-7f3a91'"], "sinks.crm.names: should be a valid list"),
    "inner": (["names = ['a', 3]"], "sinks.crm.names[1]: should be a valid string"),
    "common": (["timeout_seconds = 0"], "sinks.crm.timeout_seconds: should be greater than 0"),
    "retry": (["[sinks.crm.retry]", "attempts = 0"], "sinks.crm.retry.attempts: should be greater than or equal to 1"),
    "cloudevents": (["cloudevents = 'binary'"], "sinks.crm.cloudevents: has no effect: a plug-in gets the event"),
    "own words": (["note = 'bad canary-7f3a91'"], "sinks.crm.note: not good: …"),
    "crash": (["note = 'crash canary-7f3a91'"], "sinks.crm: the plug-in cannot read its settings: KeyError at "),
}
CHECKED = """
class Checked(Settings):
    @field_validator("note")
    @classmethod
    def _good(cls, value):
        if value.startswith("bad"):
            raise ValueError("not good: " + value)
        if value.startswith("crash"):
            raise KeyError(value)
        return value


class A(Good):
    Settings = Checked
"""


@pytest.mark.parametrize(("lines", "said"), REFUSED.values(), ids=REFUSED.keys())
def test_a_setting_that_the_model_refuses_is_named_by_its_place_and_not_repeated(
    tmp_path: Path, packages: Path, lines: list[str], said: str
) -> None:
    write_plugin(packages, "nats", CHECKED, "A")
    ended = check(tmp_path, "nats", *lines)
    assert (ended.code, ended.out) == (2, "")
    assert said in ended.err
    assert CANARY not in ended.err


def test_a_model_with_another_meaning_of_a_common_setting_is_refused(tmp_path: Path, packages: Path) -> None:
    code = "class B(PluginSettings):\n    order: str = 'x'\n    retry: int = 3\nclass A(Good):\n    Settings = B"
    write_plugin(packages, "nats", code, "A")
    assert "the plug-in gives order, retry a meaning of its own" in refusal(tmp_path, "nats")


def test_every_setting_of_a_plugin_has_a_variable(tmp_path: Path, packages: Path) -> None:
    write_plugin(packages, "nats")
    prefix = "OUTBOX_RELAY_SINKS__CRM__"
    values = {"SIZE": "7", "NAMES": '["a", "b"]', "LIMITS": '{"a": 1}', "TIMEOUT_SECONDS": "3", "TOKEN": CANARY}
    found = load(tmp_path, "nats", **{prefix + name: value for name, value in values.items()}).sinks["crm"]
    assert found.model_dump(include={"size", "names", "limits", "timeout_seconds"}) == {
        "size": 7,
        "names": ["a", "b"],
        "limits": {"a": 1},
        "timeout_seconds": 3.0,
    }
    said = refusal(tmp_path, "nats", OUTBOX_RELAY_SINKS__CRM__NAMES=CANARY)
    assert "OUTBOX_RELAY_SINKS__CRM__NAMES: sinks.crm.names: should be a valid list" in said
    assert CANARY not in said


def test_texts_of_a_plugin_are_hidden_unless_its_model_shows_them(tmp_path: Path, packages: Path) -> None:
    write_plugin(packages, "nats")
    lines = [f'{name} = "{CANARY}"' for name in ("token", "note", "file")]
    loaded = load(tmp_path, "nats", *lines, f'names = ["{CANARY}"]', "size = 3", 'stream = "s"')
    found = {name.removeprefix("sinks.crm."): value for name, value in shown(loaded).items()}
    expected = {"token": "…", "note": "…", "file": "…", "names": "…", "size": 3, "stream": "s", "mode": "fast"}
    assert expected.items() <= found.items()
    assert found["type"] == "nats"
    assert CANARY not in str(recorded(loaded, b"key"))
    other = load(tmp_path, "nats", *lines, f'names = ["{CANARY}2"]', "size = 3", 'stream = "s"')
    assert differing(loaded, other) == ["names"]
    one, two = (load(tmp_path, "nats", f'token = "{n}"', f"limits = {{a = {n}}}") for n in (1, 2))
    assert differing(one, two) == ["limits", "token"]


def differing(one: Settings, other: Settings) -> list[str]:
    """Return the settings of the sink whose recorded values differ."""
    old, new = recorded(one, b"key"), recorded(other, b"key")
    return [name.removeprefix("sinks.crm.") for name in old if old[name] != new[name]]


def test_a_file_with_the_secret_of_a_plugin_is_reported_if_others_can_read_it(tmp_path: Path, packages: Path) -> None:
    write_plugin(packages, "nats")
    loaded = load(tmp_path, "nats", f'token = "{CANARY}"')
    assert settings.exposures(loaded, {}) == []
    (tmp_path / "relay.toml").chmod(0o644)
    [said] = settings.exposures(loaded, {})
    assert "holds a secret and is open to group or others" in said


def printed(code: str) -> str:
    """Return what a new process of Python prints."""
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, check=True, text=True).stdout


@pytest.mark.processes
def test_reading_the_settings_imports_no_client_of_a_destination() -> None:
    code = "from pathlib import Path; from outbox_relay import settings; import sys; "
    code += "settings.load(Path('config/relay.example.toml'), {}); "
    code += "print([name for name in ('confluent_kafka', 'h11', 'pytest') if name in sys.modules])"
    assert printed(code) == "[]\n"


@pytest.mark.processes
def test_a_relay_imports_no_test_library() -> None:
    code = "import outbox_relay.cli.parser, outbox_relay.service.process, sys; print('pytest' in sys.modules)"
    assert printed(code) == "False\n"
