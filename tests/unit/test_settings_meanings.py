"""The meanings of settings, which messages take from the docstrings below the fields."""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

import pytest
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from outbox_relay.settings.meanings import meaning
from outbox_relay.settings.model import DatabaseSettings, Settings
from tests.support.own_models import SINKS


def models(field: FieldInfo) -> Iterator[type[BaseModel]]:
    """Yield the models in the annotation of ``field``."""
    for each in (field.annotation, *get_args(field.annotation)):
        if isinstance(each, type) and issubclass(each, BaseModel):
            yield each


def all_models() -> list[type[BaseModel]]:
    """Return every model of the file."""
    found: list[type[BaseModel]] = [Settings, *SINKS.values()]
    for model in found:
        found += (each for field in model.model_fields.values() for each in models(field) if each not in found)
    return found


@pytest.mark.parametrize("model", all_models(), ids=lambda model: model.__name__)
def test_a_meaning_is_one_sentence_without_its_end(model: type[BaseModel]) -> None:
    meanings = {name: meaning(model, name) for name in model.model_fields}
    assert any(meanings.values()) or model is Settings
    assert not any("\n" in text or ". " in text or text.endswith(".") for text in meanings.values())


def test_an_inherited_setting_and_one_with_another_name_in_the_file_have_their_meaning() -> None:
    kafka, webhook = SINKS["kafka"], SINKS["webhook"]
    assert meaning(kafka, "order") == meaning(webhook, "order") != ""
    assert meaning(DatabaseSettings, "dsn") == meaning(DatabaseSettings, "dsn_text") != ""
    assert meaning(DatabaseSettings, "no_such_setting") == ""
