"""Answers of the API compared with the schemas of its document."""

from __future__ import annotations

from typing import Any

from jsonschema import Draft202012Validator


def validate(schema: dict[str, Any], answer: Any) -> None:
    """Check that an answer is what its schema says."""
    validator: Any = Draft202012Validator(schema, format_checker=Draft202012Validator.FORMAT_CHECKER)
    validator.validate(answer)


def answer_schema(
    document: dict[str, Any], path: str, method: str = "get", media: str = "application/json"
) -> dict[str, Any]:
    """Return the schema of the answer 200 at a path, with the shapes that it refers to."""
    content = document["paths"][path][method]["responses"]["200"]["content"][media]
    return {**content["schema"], "components": document["components"]}
