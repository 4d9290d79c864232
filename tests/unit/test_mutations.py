"""The mutations that the state machine is tried with speak of the code as it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.property.mutations import MUTATIONS, ROOT, Mutation, outcome


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.left_out)
def test_what_a_mutation_takes_out_stands_in_the_code_once(mutation: Mutation) -> None:
    file, start, end = mutation.found_in(ROOT)
    assert file.read_text(encoding="utf-8").count(mutation.text, start, end) == 1


def test_a_function_is_mutated_and_nothing_beside_it(tmp_path: Path) -> None:
    file = tmp_path / "schema" / "functions" / "some.sql"
    file.parent.mkdir(parents=True)
    body = "create or replace function outbox_internal.{}(n int) returns int\nlanguage plpgsql\nas $$\n  rule\n$$;\n"
    file.write_text(f"-- rule\n{body.format('f')}-- rule\n{body.format('g')}")
    Mutation("the rule", "outbox_internal.f", "rule", "gone").take_out(tmp_path)
    assert file.read_text() == f"-- rule\n{body.format('f').replace('rule', 'gone')}-- rule\n{body.format('g')}"


@pytest.mark.parametrize(
    ("exit_code", "output", "found", "text"),
    [
        (0, "1 passed", False, "NOT FOUND"),
        (1, "FAILED test.py::test - AssertionError: two owners", True, "found: AssertionError: two owners"),
        (1, "FAILED test.py::test - Failed: Timeout (>600.0s) from pytest-timeout.", False, "TIMED OUT"),
        (1, "FAILED t.py::test - hypothesis.errors.Flaky: how", False, "NOT JUDGED: hypothesis.errors.Flaky: how"),
    ],
    ids=["passed", "failed", "timed out", "flaky"],
)
def test_only_a_judgement_counts_as_found(exit_code: int, output: str, found: bool, text: str) -> None:
    assert outcome(exit_code, output) == (found, text)


@pytest.mark.parametrize(("exit_code", "output"), [(4, "no module"), (1, "ERROR test.py::test - no module")])
def test_tests_that_did_not_run_are_an_error(exit_code: int, output: str) -> None:
    with pytest.raises(RuntimeError, match="no module"):
        outcome(exit_code, output)
