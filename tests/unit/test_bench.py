"""The bench's figures, report, plots and choice of scenarios: what they count, and what they say."""

from __future__ import annotations

import math
import os
import subprocess
import time
from collections.abc import Generator, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import psycopg
import pytest
from confluent_kafka import KafkaException

from outbox_relay.workbench.bench import machine, receiver, run
from outbox_relay.workbench.bench.counter import Counter
from outbox_relay.workbench.bench.environment import BenchEnvironment, Options
from outbox_relay.workbench.bench.figures import Figure, Progress, Summary, percentile, ratio, summarise
from outbox_relay.workbench.bench.handler_log import HandlerLog
from outbox_relay.workbench.bench.profile import Profile
from outbox_relay.workbench.bench.run import BenchRun, ScenarioRuns, choose
from outbox_relay.workbench.bench.scenarios import SCENARIOS, Scenario, queue
from outbox_relay.workbench.embedded.process import ProcessFailed
from outbox_relay.workbench.signals import Interrupted, Signals
from tests.support.command import inside
from tests.support.wait import until

RECEIVER = "outbox_relay.workbench.bench.receiver"


def progress(*samples: tuple[float, int]) -> Progress:
    found = Progress()
    for at, count in samples:
        found.add(at, count)
    return found


# -- figures ------------------------------------------------------------------------------------------------------


def test_runs_are_summarised_by_label_in_order_of_first_appearance() -> None:
    runs = [[Figure("b", 3, "ms"), Figure("a", 1, "ms")], [Figure("b", 1, "ms")], [Figure("b", 2, "ms")]]
    first, second = summarise(runs)
    assert first == Summary("b", "ms", (3, 1, 2))
    assert (first.median, first.least, first.most) == (2, 1, 3)
    assert second == Summary("a", "ms", (1,))


def test_one_label_in_two_units_is_two_figures() -> None:
    assert len(summarise([[Figure("relay", 1, "ms"), Figure("relay", 1, "MB")]])) == 2


def test_ratio_to_zero_is_infinite() -> None:
    assert ratio("r", 3, 4) == Figure("r", 0.75, "ratio")
    assert ratio("r", 3, 0).value == math.inf


@pytest.mark.parametrize(("share", "value"), [(0.5, 50), (0.99, 99), (1.0, 100), (0.001, 1), (0.0, 1)])
def test_percentile_is_the_nearest_rank(share: float, value: float) -> None:
    assert percentile(range(100, 0, -1), share) == value


def test_percentile_without_values_is_an_error() -> None:
    with pytest.raises(ValueError, match="no values"):
        percentile([], 0.5)


def test_rate_is_from_the_first_sample_with_events_to_the_first_with_all() -> None:
    assert progress((0.0, 0), (8.0, 0), (9.0, 100), (10.0, 600), (11.0, 1_100), (15.0, 1_100)).per_second == 500


def test_count_reached_in_one_sample_grew_since_the_sample_before() -> None:
    assert progress((0.0, 0), (8.0, 0), (10.0, 100)).per_second == 50


def test_rate_without_events_is_zero() -> None:
    assert progress().per_second == 0
    assert progress((1.0, 0), (2.0, 0)).per_second == 0


def test_progress_knows_when_a_count_was_reached() -> None:
    samples = progress((1.0, 0), (2.0, 10), (3.0, 90), (4.0, 100))
    assert [samples.reached_at(count) for count in (1, 10, 11, 100)] == [2.0, 2.0, 3.0, 4.0]
    with pytest.raises(ValueError, match="101 was never reached"):
        samples.reached_at(101)


# -- scenarios ----------------------------------------------------------------------------------------------------


def test_scenarios_have_unique_names_and_some_are_quick() -> None:
    names = [one.name for one in SCENARIOS]
    assert len(set(names)) == len(names)
    assert [one.name for one in choose([], full=True)] == names
    assert {"drain", "emit", "latency", "webhooks"} <= {one.name for one in choose([], full=False)} < set(names)


def test_named_scenarios_run_in_order_in_any_mode() -> None:
    assert [one.name for one in choose(["memory", "drain"], full=False)] == ["drain", "memory"]


def test_unknown_scenario_is_refused_with_the_known_ones() -> None:
    ended = inside("bench", "--only", "drian")
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.startswith("--only drian: unknown scenario; choose from drain, webhooks, ")


@pytest.fixture
def options() -> Options:
    return Options(scale=0.5)


@pytest.fixture
def bench(options: Options) -> Generator[BenchEnvironment]:
    """Provide an environment in which no server is started."""
    with ExitStack() as stack:
        yield BenchEnvironment(stack, Signals(), options, lambda _: None)


def scenario(name: str, found: Figure | Exception, max_runs: int = 100) -> Scenario:
    def measure(_bench: BenchEnvironment) -> Sequence[Figure]:
        if isinstance(found, Exception):
            raise found
        return [found]

    return Scenario(name, "", measure, quick=True, max_runs=max_runs)


SOUND = scenario("sound", Figure("relay", 1, "ms"))
ONCE = scenario("once", Figure("relay", 1, "ms"), max_runs=1)


@pytest.mark.parametrize(
    "failure",
    [
        ProcessFailed("the relay ended\nits log"),
        psycopg.OperationalError("failed to resolve host 'SECRET@h': x"),
        KafkaException("x"),
        OSError("x"),
    ],
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


def test_signal_is_not_a_failure_of_a_scenario(bench: BenchEnvironment) -> None:
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


@pytest.mark.parametrize(
    ("options", "events", "seconds"),
    [(Options(full=False, scale=0.5), 50, 0.5), (Options(full=True, scale=0.5), 500, 5.0)],
)
def test_sizes_are_of_the_mode_and_scaled(bench: BenchEnvironment, events: int, seconds: float) -> None:
    assert bench.scaled_events(100, 1_000) == events
    assert bench.scaled_seconds(1, 10) == seconds


@pytest.mark.parametrize(
    ("within", "full", "only", "rounds"),
    [(0.0, False, [], 1), (60.0, False, [], 3), (0.0, True, [], 3), (0.0, False, ["sound"], 3)],
)
def test_quick_run_omits_rounds_beyond_its_time_limit(
    bench: BenchEnvironment, monkeypatch: pytest.MonkeyPatch, within: float, full: bool, only: list[str], rounds: int
) -> None:
    monkeypatch.setattr(run, "QUICK_SECONDS", within)
    monkeypatch.setattr(run, "SCENARIOS", (SOUND, ONCE))
    bench_run = BenchRun(Options(full=full), only, runs=3)
    assert bench_run.rounds(bench) == rounds
    found = {each.scenario.name: len(each.runs) for each in bench_run.taken}
    assert found == {"sound": rounds} if only else {"sound": rounds, "once": 1}


# -- parts of scenarios -------------------------------------------------------------------------------------------


def test_counts_are_visible_to_another_reader_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "counter"
    reading = Counter(path)
    writing = Counter(path)
    writing.add(0)
    writing.add(1, 5)
    writing.add(0)
    assert [reading.read(slot) for slot in range(3)] == [2, 5, 0]


def test_handlers_and_the_bench_share_a_log(tmp_path: Path) -> None:
    path = tmp_path / "log"
    bench = HandlerLog(path, 2)
    handlers = HandlerLog(path)
    assert handlers.opened_at == 0
    bench.open(7.5)
    assert handlers.opened_at == 7.5
    for wait in (0.25, 0.5, 0.75):  # one more than it was made for
        handlers.add_wait(wait)
        handlers.add_done()
    assert (bench.waits(), bench.done()) == ([0.25, 0.5], 3)


@pytest.mark.parametrize(("key", "fails"), [("k0", True), ("k120", True), ("k5", False), ("k101", False), ("", False)])
def test_one_key_in_ten_fails(key: str, fails: bool) -> None:
    head = f"POST /hooks HTTP/1.1\r\nhost: x0\r\nOutbox-Key: {key}\r\ncontent-length: 10\r\n".encode()
    assert (receiver.FAILING.search(head) is not None) is fails


def test_hardware_is_described() -> None:
    found = machine.hardware()
    assert int(found["cores"]) >= 1
    assert found.keys() >= {"processor", "memory", "system"}


def test_profile_covers_the_events_after_the_first_sample() -> None:
    """Only the work of this thread between the first event and the last counts."""
    counts = iter([0, 20, 120])
    profile = Profile("it")
    count = profile.sampled(lambda: next(counts), os.getpid(), 120)
    for sample in range(3):
        _work(0.2)
        assert count() == (0, 20, 120)[sample]
    [main] = [figure for figure in profile.figures if figure.label == "it: main thread"]
    assert (main.value, main.unit) == (pytest.approx(2000, rel=0.3), "us")


def _work(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


@pytest.mark.processes
def test_profile_includes_the_processes_that_the_sender_has_started() -> None:
    counts = iter([1, 101])
    profile = Profile("it")
    count = profile.sampled(lambda: next(counts), os.getpid(), 101)
    with subprocess.Popen(["/bin/sh", "-c", "echo; while :; do :; done"], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        count()
        until(lambda: machine.cpu_seconds(child.pid) >= 0.1, seconds=60, what="the child has worked")
        count()
        child.kill()
    [workers] = [figure for figure in profile.figures if figure.label == "it: worker processes"]
    assert workers.value >= 500


def test_lapsed_leases_are_summed_over_the_metrics() -> None:
    text = 'outbox_lease_lost_total{sink="a"} 2.0\noutbox_lease_lost_total{sink="b"} 1.0\nother 5\n'
    assert queue.lapsed_leases(SimpleNamespace(metrics=lambda: text)) == 3  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="no metric"):
        queue.lapsed_leases(SimpleNamespace(metrics=lambda: None))  # type: ignore[arg-type]


def test_profile_of_a_single_sample_has_no_figures() -> None:
    profile = Profile("it")
    assert profile.sampled(lambda: 7, os.getpid(), 7)() == 7
    assert profile.figures == []
