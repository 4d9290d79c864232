"""The judge of replays in the chaos suite reports each thing that may go wrong with one, and nothing else."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.chaos.replays import Found, judge

A, B, C, D, STRANGER = (bytes([n] * 16) for n in range(5))
SOUND = Found(7, "webhook", "done", 4, 2, 1, 1, expected={A, B, C, D}, passed={C}, died={D}, rowed={C, D})
CAME = {A, B}


def said(found: Found, came: set[bytes] = CAME) -> list[str]:
    return [line.removeprefix("replay 7 of webhook").removeprefix(": ") for line in judge(found, came)]


def test_a_replay_whose_events_all_came_were_passed_by_or_died_is_sound() -> None:
    assert said(SOUND) == []


def test_a_skipped_event_is_reported_though_it_was_counted_as_passed_by() -> None:
    """Goes red when `passed_by` is whatever is left of the total."""
    residual = replace(SOUND, delivered=1, passed_by=2)
    assert said(residual, {A}) == [
        "1 events did not arrive, were not passed by and did not die",
        "it counted 2 events as passed by and 1 as failed, and they are 1 and 1",
    ]


def test_an_event_is_passed_by_only_if_it_had_a_row_or_a_mark() -> None:
    unfounded = replace(SOUND, passed={B, C}, passed_by=2, delivered=1)
    assert said(unfounded, {A}) == ["1 events were passed by that had neither a row nor a mark"]


@pytest.mark.parametrize(
    ("found", "came", "line"),
    [
        (replace(SOUND, state="running"), CAME, " is running at the end"),
        (SOUND, CAME | {STRANGER}, "1 events arrived that it does not mean"),
        (
            replace(SOUND, expected={A, B, C, D, STRANGER}),
            CAME | {STRANGER},
            "it counted 4 events, and means 5",
        ),
        (replace(SOUND, delivered=3), CAME, "it counted 3 events as delivered, and 2 arrived"),
        (replace(SOUND, failed=2), CAME, "it counted 1 events as passed by and 2 as failed, and they are 1 and 1"),
    ],
)
def test_each_other_fault_is_reported(found: Found, came: set[bytes], line: str) -> None:
    assert line in said(found, came)
