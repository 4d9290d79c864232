"""What the models of the settings have in common: their strictness and the types of their numbers and names."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict

STRICTNESS = ConfigDict(
    frozen=True, extra="forbid", hide_input_in_errors=True, allow_inf_nan=False, use_attribute_docstrings=True
)
"""Immutable, no unknown keys, no value in an error, no infinite or missing number."""


class Section(BaseModel):
    """A table of the file."""

    model_config = STRICTNESS


def _no_boolean(value: object) -> object:
    if isinstance(value, bool):
        raise ValueError("should be a number")  # noqa: TRY004 - pydantic collects ValueError
    return value


Count = Annotated[int, BeforeValidator(_no_boolean)]
"""A whole number; true and false are none."""
Number = Annotated[float, BeforeValidator(_no_boolean)]
"""A number, with or without a fraction; true and false are none."""
