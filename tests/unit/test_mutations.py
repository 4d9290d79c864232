"""The mutations that the state machine is tried with speak of the code as it is."""

from __future__ import annotations

import pytest

from tests.property.mutations import MUTATIONS, ROOT, Mutation, outcome


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.left_out)
def test_what_a_mutation_takes_out_stands_in_the_code_once(mutation: Mutation) -> None:
    assert (ROOT / mutation.file).read_text(encoding="utf-8").count(mutation.text) == 1


@pytest.mark.parametrize(
    ("exit_code", "output", "found", "text"),
    [
        (0, "1 passed", False, "NOT FOUND"),
        (1, "FAILED test.py::test - AssertionError: two owners", True, "found: AssertionError: two owners"),
        (1, "FAILED test.py::test - Failed: Timeout (>600.0s) from pytest-timeout.", False, "TIMED OUT"),
    ],
    ids=["passed", "failed", "timed out"],
)
def test_only_a_judgement_counts_as_found(exit_code: int, output: str, found: bool, text: str) -> None:
    assert outcome(exit_code, output) == (found, text)


@pytest.mark.parametrize(("exit_code", "output"), [(4, "no module"), (1, "ERROR test.py::test - no module")])
def test_tests_that_did_not_run_are_an_error(exit_code: int, output: str) -> None:
    with pytest.raises(RuntimeError, match="no module"):
        outcome(exit_code, output)
