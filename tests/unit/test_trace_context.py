"""The context in an event's headers, which are any text that an application emitted."""

from __future__ import annotations

import json

import pytest

from outbox_relay.formats.trace_context import TraceContext, trace_context, trace_id

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
VALID = f"00-{TRACE}-{SPAN}-01"


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({"traceparent": VALID}, TraceContext(TRACE, SPAN, 1)),
        ({"TraceParent": f" {VALID}\t", "TRACESTATE": "a=1"}, TraceContext(TRACE, SPAN, 1, "a=1")),
        ({"traceparent": f"00-{TRACE}-{SPAN}-00"}, TraceContext(TRACE, SPAN, 0)),
        ({"traceparent": f"cc-{TRACE}-{SPAN}-03-more"}, TraceContext(TRACE, SPAN, 3)),
        ({"traceparent": VALID, "tracestate": "a" * 513}, TraceContext(TRACE, SPAN, 1)),
    ],
)
def test_a_valid_context_is_found(headers: dict[str, str], expected: TraceContext) -> None:
    assert trace_context(json.dumps(headers)) == expected
    assert trace_id(json.dumps(headers)) == TRACE


@pytest.mark.parametrize(
    "parent",
    [
        "",
        "-",
        "canary",
        VALID[:-1],
        f"{VALID}0",
        f"{VALID}-more",
        f"cc-{TRACE}-{SPAN}-01more",
        f"ff-{TRACE}-{SPAN}-01",
        VALID.upper(),
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE}-{SPAN}-0g",
        f"00-{TRACE[:-1]}\u0661-{SPAN}-01",
        f"{VALID}\n",
        "00-" * 5000,
        "\u0000",
        "\ud800",
    ],
)
def test_any_other_text_is_no_context(parent: str) -> None:
    assert trace_context(json.dumps({"traceparent": parent})) is None
    assert trace_id(json.dumps({"traceparent": parent})) is None


@pytest.mark.parametrize(
    "text",
    [None, "", "{}", '"traceparent"', '["traceparent"]', '{"traceparent": 1}', '{"traceparent": null}', "traceparent",
     '{"traceparent": ' + "[" * 100_000, json.dumps({"other": f'", "traceparent": "{VALID}'})],
    ids=range(10),
)  # fmt: skip
def test_headers_of_another_shape_have_no_context(text: str | None) -> None:
    assert trace_context(text) is None
