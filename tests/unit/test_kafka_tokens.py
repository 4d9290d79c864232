"""Functions of the application that return tokens for SASL OAUTHBEARER."""

import sys
import time
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from outbox_relay.domain.errors import ConfigurationError
from outbox_relay.sinks.kafka.settings import TokenProvider, TokenUnavailable
from tests.docs.pages import blocks

MODULE = "application_of_this_test"


def provider(monkeypatch: pytest.MonkeyPatch, function: Any) -> TokenProvider:
    """Return the provider of an application that has `function`."""
    module = ModuleType(MODULE)
    module.token = function  # pyright: ignore[reportAttributeAccessIssue] - a module takes any attribute
    monkeypatch.setitem(sys.modules, MODULE, module)
    return TokenProvider(f"{MODULE}:token")


def test_a_lifetime_ends_that_many_seconds_from_now(monkeypatch: pytest.MonkeyPatch) -> None:
    before = time.time()
    token, end = provider(monkeypatch, lambda: ("a.b.c", 900)).callback()(None)
    assert token == "a.b.c"
    assert before + 900 <= end <= time.time() + 900


def test_a_client_begins_with_one_token_and_asks_for_the_next_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    def token() -> tuple[str, float]:
        made.append(f"token-{len(made)}")
        return made[-1], 900

    callback = provider(monkeypatch, token).callback()
    assert made == ["token-0"]
    assert [callback(None)[0] for _ in range(3)] == ["token-0", "token-1", "token-2"]


@pytest.mark.parametrize("wrong", ["a.b.c", None, ("", 900), (b"a.b.c", 900), ("a.b.c", "900"), ("a.b.c", 900, "x")])
def test_anything_else_is_no_token_and_is_not_repeated(monkeypatch: pytest.MonkeyPatch, wrong: object) -> None:
    with pytest.raises(TokenUnavailable) as refused:
        provider(monkeypatch, lambda: wrong).callback()
    assert "a.b.c" not in str(refused.value)


@pytest.mark.parametrize("name", ["no_module_for_tests:token", "json:no_function", "json:__name__"])
def test_what_is_no_function_is_refused_by_its_name(name: str) -> None:
    with pytest.raises(ConfigurationError, match=f'token_provider "{name}"'):
        TokenProvider(name)


def test_the_function_of_the_page_returns_a_token_of_aws(monkeypatch: pytest.MonkeyPatch) -> None:
    end = time.time() + 900

    def generate(region: str) -> tuple[str, int]:
        return f"signed for {region}", int(end * 1000)

    signer = SimpleNamespace(MSKAuthTokenProvider=SimpleNamespace(generate_auth_token=generate))
    monkeypatch.setitem(sys.modules, "aws_msk_iam_sasl_signer", signer)
    [block] = [block for block in blocks("docs/kafka.md") if block.language == "python"]
    names: dict[str, Any] = {}
    exec(block.text, names)  # noqa: S102 - the code of the page
    found = provider(monkeypatch, names["token"]).callback()(None)
    assert found == ("signed for eu-west-1", pytest.approx(end, abs=1))
