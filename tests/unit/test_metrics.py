"""Exported metrics: both formats, the choice between them, and figures that another version may have stored."""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from prometheus_client.openmetrics import exposition as openmetrics

from outbox_relay.domain.measures import RelayMeasures, SinkMeasures
from outbox_relay.domain.outcomes import Failed
from outbox_relay.service.metrics import exposition
from outbox_relay.service.metrics.collector import SnapshotCollector
from outbox_relay.service.metrics.definitions import DEFINITIONS, FIGURES, GROUPS, PER_SINK, TABLES
from outbox_relay.service.metrics.exposition import OPENMETRICS, TEXT, Exposition, negotiate, render
from outbox_relay.service.metrics.snapshot import Aged, SinkCopy, Snapshot
from outbox_relay.service.metrics.stored_figures import Entry, Value, dump, load
from outbox_relay.sinks.contract.handing import an_event
from tests.support.metrics import families, promtool_complaints

NOW = datetime(2026, 5, 1, 12, tzinfo=UTC)
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = f"00-{TRACE}-00f067aa0ba902b7-01"
PROMETHEUS = (
    "application/openmetrics-text;version=1.0.0;q=0.5,application/openmetrics-text;version=0.0.1;q=0.4,"
    "text/plain;version=0.0.4;q=0.3,*/*;q=0.2"
)
LABELS = {"sink": "crm", "state": "dead", "table": "event"}


def a_sink(name: str = "crm") -> SinkCopy:
    measures = SinkMeasures()
    event = an_event(headers=f'{{"traceparent": "{PARENT}"}}')._replace(created_at=NOW - timedelta(seconds=2))
    measures.delivered([event] * 100, 0.02, NOW)
    measures.attempted(Failed("status 500"), 0.3)
    measures.died(["refused"])
    for histogram in (measures.read, measures.claim, measures.settle):
        histogram.observe(0.004)
    return SinkCopy(
        *(
            name,
            100,
            {outcome: each.copy() for outcome, each in measures.attempts.items()},
            {"refused": 1},
            {"reload": 2},
        ),
        *(measures.end_to_end.copy(), measures.read.copy(), measures.claim.copy(), measures.settle.copy()),
        *(1, "open", 3, 64, 2, 1, 32),
    )


def entries(at: float) -> list[Entry]:
    """Return every figure, as one relay measures them."""
    found: list[Entry] = []
    for group in sorted(GROUPS):
        sink = "crm" if group in PER_SINK else None
        values = (Value(d.name, tuple(LABELS[label] for label in d.labels), 5.0) for d in FIGURES if d.group == group)
        found.append(Entry(group, sink, at, 10.0, False, tuple(values)))
    return found


def a_snapshot(sinks: int = 1) -> Snapshot:
    tick = RelayMeasures().tick
    tick.observe(0.001)
    names = ["crm", *(f"s{number}" for number in range(1, sinks))]
    figures = tuple(Aged(entry, 4.0) for entry in entries(0.0))
    return Snapshot(tuple(a_sink(name) for name in names), tick.copy(), {"emitted": 3}, figures, True, "1.2.3")


@pytest.mark.parametrize("content_type", [TEXT, OPENMETRICS])
def test_both_formats_have_every_metric_with_its_type_unit_labels_and_help(content_type: str) -> None:
    is_openmetrics = content_type == OPENMETRICS
    found = families(render(a_snapshot(), content_type).decode(), is_openmetrics=is_openmetrics)
    assert len(found) == len(DEFINITIONS)
    for definition in DEFINITIONS:
        name = definition.family if is_openmetrics or definition.type != "info" else definition.name
        family = found[name]
        text_type = {"info": "gauge"}.get(definition.type, definition.type)
        assert family.type == (definition.type if is_openmetrics else text_type)
        assert family.documentation == definition.help
        assert family.samples, name
        assert {label for sample in family.samples for label in sample.labels} - {"le"} == set(definition.labels), name
        if is_openmetrics:
            assert family.unit == definition.unit


def test_promtool_finds_no_fault() -> None:
    assert promtool_complaints(render(a_snapshot(), TEXT).decode()) == ""


def test_the_count_of_a_histogram_is_that_of_its_buckets_and_exemplars_name_event_and_trace() -> None:
    found = families(render(a_snapshot(), OPENMETRICS).decode(), is_openmetrics=True)["outbox_end_to_end_seconds"]
    counts = [sample.value for sample in found.samples if sample.name.endswith(("_count", "_bucket"))]
    assert max(counts) == counts[-1] == 100.0
    [exemplar] = [sample.exemplar for sample in found.samples if sample.exemplar]
    assert (set(exemplar.labels), exemplar.labels["trace_id"]) == ({"uid", "trace_id"}, TRACE)
    assert (exemplar.value, float(cast("float", exemplar.timestamp))) == (2.0, NOW.timestamp())
    assert "# {" not in render(a_snapshot(), TEXT).decode()


def test_a_series_that_was_never_observed_is_left_out() -> None:
    found = families(render(a_snapshot(), TEXT).decode())["outbox_attempts"]
    assert {sample.labels["outcome"] for sample in found.samples} == {"delivered", "failed"}


@pytest.mark.parametrize(
    ("accept", "expected"),
    [
        ([], TEXT),
        (["*/*"], TEXT),
        ([PROMETHEUS], OPENMETRICS),
        (["text/plain", "application/openmetrics-text"], OPENMETRICS),
        (["application/openmetrics-text;q=0.2, text/plain;q=0.3"], TEXT),
        (["application/openmetrics-text; q=0"], TEXT),
        (["application/openmetrics-text; version=2.0.0"], TEXT),
        (['APPLICATION/OpenMetrics-Text; Version="1.0.0"'], OPENMETRICS),
        (["application/openmetrics-text;q=nan"], TEXT),
        (["application/openmetrics-text;q=1e9"], TEXT),
        (["application/openmetrics-text;q=x"], TEXT),
        (["image/png," * 100 + "application/openmetrics-text"], TEXT),
        ([";;;=,,q=,=;q"], TEXT),
    ],
)
def test_openmetrics_is_given_only_if_it_is_asked_for(accept: list[str], expected: str) -> None:
    assert negotiate(accept) == expected


@given(st.lists(st.text(max_size=200), max_size=5))
def test_no_header_is_too_odd_to_choose_by(accept: list[str]) -> None:
    assert negotiate(accept) in (TEXT, OPENMETRICS)


def test_an_answer_is_rendered_once_for_all_who_ask_within_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[Snapshot] = []

    def take() -> Snapshot:
        taken.append(a_snapshot())
        return taken[-1]

    pages = Exposition(take)
    assert len({pages.answer([]) for _ in range(20)}) == len(taken) == 1
    pages.answer([OPENMETRICS])
    assert len(taken) == 2
    monkeypatch.setattr(exposition, "KEPT_SECONDS", 0.0)
    pages.answer([])
    assert len(taken) == 3


# -- figures that are stored ----------------------------------------------------------------------------------


def test_figures_are_read_as_they_were_stored() -> None:
    stored = dump(entries(100.0))
    assert load(stored, 105.0) == entries(100.0)


def test_every_figure_is_of_a_group() -> None:
    assert {definition.group for definition in FIGURES} == GROUPS


@pytest.mark.parametrize(("now", "known"), [(99.9, False), (100.0, True), (129.9, True), (130.0, False)])
def test_figures_from_the_future_and_old_ones_are_unknown(now: float, known: bool) -> None:
    assert bool(load(dump(entries(100.0)), now)) == known


@pytest.mark.parametrize(
    "value",
    [
        ["outbox_backlog_events", ["crm"], -1],
        ["outbox_backlog_events", ["crm"], float("nan")],
        ["outbox_backlog_events", ["crm"], float("inf")],
        ["outbox_backlog_events", ["crm"], 10**400],
        ["outbox_backlog_events", ["crm"], True],
        ["outbox_backlog_events", ["crm"], "5"],
        ["outbox_backlog_events", ["other"], 5],
        ["outbox_backlog_events", ["~7"], 5],
        ["outbox_backlog_events", ["crm\n"], 5],
        ["outbox_backlog_events", [], 5],
        ["outbox_backlog_events", ["crm", "x"], 5],
        ["outbox_backlog_events", "crm", 5],
        ["outbox_paused", ["crm"], 1],
        ["outbox_unheard_of", ["crm"], 1],
        [["outbox_backlog_events"], ["crm"], 5],
        ["outbox_backlog_events"],
        None,
    ],
)
def test_a_value_that_is_not_as_expected_is_unknown_and_the_others_are_not(value: object) -> None:
    good = ["outbox_oldest_undelivered_seconds", ["crm"], 2.5]
    entry = {"group": "backlog", "sink": "crm", "at": 100, "every": 10, "failed": False, "values": [value, good]}
    [found] = load({"format": 1, "entries": [entry]}, 101.0)
    assert found.values == (Value("outbox_oldest_undelivered_seconds", ("crm",), 2.5),)


@pytest.mark.parametrize(
    "change",
    [{"group": "unheard"}, {"group": 3}, {"sink": None}, {"sink": "~7"}, {"at": None}, {"at": "x"}, {"every": -1}],
)
def test_an_entry_that_is_not_as_expected_is_unknown(change: dict[str, object]) -> None:
    entry = {
        "group": "backlog",
        "sink": "crm",
        "at": 100,
        "every": 10,
        "failed": False,
        "values": list[Any](),
        **change,
    }
    assert load({"format": 1, "entries": [entry]}, 101.0) == []


def test_figures_of_a_newer_format_are_unknown() -> None:
    assert load({**dump(entries(100.0)), "format": 2}, 101.0) == []


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["group", "sink", "at", "every", "values", "entries", "format"]), inner)
    ),
    max_leaves=20,
)


@given(json_values, st.floats())
def test_nothing_that_is_stored_raises(stored: object, now: float) -> None:
    load(stored, now)
    load({"format": 1, "entries": [stored]}, now)
    load({"format": 1, "entries": [{"group": "tables", "sink": None, "at": 1, "every": 1, "values": [stored]}]}, 1.0)


def test_the_tables_are_words_that_a_label_may_have() -> None:
    assert all(table.isidentifier() for table in TABLES)


def test_openmetrics_is_what_the_library_makes_of_it_with_fewer_calls() -> None:
    """Goes red when each character of each name is examined for each line, as the library does."""
    snapshot = a_snapshot(10)
    registry = CollectorRegistry(auto_describe=False)
    registry.register(SnapshotCollector(snapshot))
    by_default = cast("Callable[[CollectorRegistry], bytes]", cast("Any", openmetrics).generate_latest)
    assert render(snapshot, OPENMETRICS) == by_default(registry)
    usual = _calls(lambda: by_default(registry))
    assert _calls(lambda: render(snapshot, OPENMETRICS)) < 0.9 * usual


def _calls(do: Callable[[], object]) -> int:
    """Return the number of calls of functions, which no other process changes."""
    count = 0

    def called(_frame: object, event: str, _argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(called)
    try:
        do()
    finally:
        sys.setprofile(None)
    return count
