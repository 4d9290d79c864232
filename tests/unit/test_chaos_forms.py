"""The forms of the chaos suite require what they inject: a lane that comes to nothing is a failure."""

from __future__ import annotations

import pytest

from tests.chaos.forms import FORMS, LONG, SHORT, Form


def injected(form: Form, words: str) -> int:
    """Return how often a form injects the faults that begin with these words."""
    counts = [form.alone, *form.lanes.values()]
    return sum(number for faults in counts for fault, number in faults.items() if fault.startswith(words))


def test_the_short_form_requires_what_the_long_one_does_if_it_injects_it() -> None:
    """Goes red without `held snapshot`, `long transaction` or `health flood`."""
    assert sorted(words for words in LONG.least if injected(SHORT, words) and words not in SHORT.least) == []


@pytest.mark.parametrize("form", FORMS.values(), ids=list(FORMS))
def test_no_form_requires_more_than_it_injects(form: Form) -> None:
    assert {words: least for words, least in form.least.items() if injected(form, words) < least} == {}


@pytest.mark.parametrize("form", FORMS.values(), ids=list(FORMS))
def test_every_form_requires_unique_keys_merged_calls_and_times_of_schedules(form: Form) -> None:
    """Goes red without `least_jobs`: `test_a_run_without_jobs_is_a_failure` shows what it requires."""
    assert form.least_jobs >= 100
