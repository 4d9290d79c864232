"""Verdicts of plug-ins, checked: their types, their order, and what is stored of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import cast

from outbox_relay.domain.event import StoredEvent
from outbox_relay.domain.outcomes import DELIVERED, Attempt, Delivered, Failed, Refused, Unavailable, Verdict, printable
from outbox_relay.sinks.plugin.redaction import of_event, without

CODE = "plugin_error"
"""The code of attempts that failed for the plug-in itself."""
CODE_CHARS, PART_CHARS, ANSWER_CHARS, DETAILS, STEPS = 40, 200, 500, 16, 16
"""Limits of what a verdict has to say."""
BEHIND = "an earlier event of its key was not delivered"

Hide = Callable[[str, StoredEvent], str]


def read_verdicts(answer: object, batch: Sequence[StoredEvent], settings_texts: Sequence[str]) -> list[Verdict] | str:
    """Return the verdicts in the ``answer`` to a call with ``batch``, or what is wrong with it.

    Reasons repeat neither ``settings_texts`` nor key or payload of their event.
    """
    if not isinstance(answer, list | tuple):
        return f"returned {_named(answer)} in place of a list of verdicts"
    verdicts = cast("Sequence[object]", answer)
    if len(verdicts) != len(batch):
        return f"returned {len(verdicts)} verdicts for {len(batch)} {'event' if len(batch) == 1 else 'events'}"
    found: list[Verdict] = []
    for event, verdict in zip(batch, verdicts, strict=True):
        if verdict is DELIVERED:
            found.append(DELIVERED)
            continue
        checked = _checked(verdict, lambda text, event=event: without(text, settings_texts, of_event(event)))
        if checked is None:
            return f"returned {_named(verdict)} in place of a verdict"
        found.append(checked)
    return found


def _named(value: object) -> str:
    return "None" if value is None else f"a value of the class {type(value).__name__}"


def _checked(verdict: object, hide: Callable[[str], str]) -> Verdict | None:
    """Return ``verdict`` with values that can be stored, or None if it is none. Odd details are left out."""
    match verdict:
        case Delivered(status, seconds, detail):
            return Delivered(_status(status), _seconds(seconds), _detail(detail))
        case Failed(str(reason), status, retry_after, attempt):
            return Failed(hide(reason), _status(status), _seconds(retry_after), _attempt(attempt, hide))
        case Refused(str(reason), status, attempt):
            return Refused(hide(reason), _status(status), _attempt(attempt, hide))
        case Unavailable(reason=str(reason)):
            part = verdict.part
            return Unavailable(
                hide(reason),
                _status(verdict.status),
                _seconds(verdict.retry_after_seconds),
                _attempt(verdict.attempt, hide),
                throttled=verdict.throttled is True,
                gone=verdict.gone is True,
                part=hide(part)[:PART_CHARS] if isinstance(part, str) else None,  # pyright: ignore[reportUnnecessaryIsInstance]
                behind=verdict.behind is True,
            )
        case _:
            return None


def _status(status: object) -> int | None:
    return status if type(status) is int and 0 <= status <= 999 else None  # a status of HTTP, or like one


def _seconds(seconds: object) -> float | None:
    if isinstance(seconds, bool) or not isinstance(seconds, int | float):
        return None
    return float(seconds) if math.isfinite(seconds) and 0 <= seconds < 1e9 else None


def _attempt(attempt: object, hide: Callable[[str], str]) -> Attempt | None:
    if not isinstance(attempt, Attempt) or not isinstance(attempt.code, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        return None
    answer: object = attempt.answer
    steps = [(hide(str(name))[:CODE_CHARS], taken) for name, seconds in attempt.steps if (taken := _seconds(seconds))]
    text = hide(answer)[:ANSWER_CHARS] if isinstance(answer, str) else None
    return Attempt(hide(attempt.code)[:CODE_CHARS], _seconds(attempt.seconds), text, tuple(steps[:STEPS]))


def _detail(detail: object) -> Mapping[str, str | int] | None:
    if not isinstance(detail, Mapping):
        return None
    found: dict[str, str | int] = {}
    for name, value in list(cast("Mapping[object, object]", detail).items())[:DETAILS]:
        if type(value) is int and abs(value) < 2**63:
            found[printable(str(name))[:CODE_CHARS]] = value
        else:
            found[printable(str(name))[:CODE_CHARS]] = printable(str(value))[:PART_CHARS]
    return found


def in_order(batch: Sequence[StoredEvent], verdicts: Sequence[Verdict]) -> list[Verdict]:
    """Return the verdicts so that nothing counts as delivered behind an undelivered event of its key.

    Such an event is sent again after that one. Refused events hold up no other.
    """
    stopped, found = set[str](), list(verdicts)
    for place, (event, verdict) in enumerate(zip(batch, verdicts, strict=True)):
        if event.key is None:
            continue
        if isinstance(verdict, Failed | Unavailable):
            stopped.add(event.key)
        elif event.key in stopped and isinstance(verdict, Delivered):
            found[place] = Unavailable(BEHIND)
    return found


def with_details(verdict: Verdict, seconds: float) -> Verdict:
    """Return the verdict of an event whose delivery is recorded, with its duration."""
    if not isinstance(verdict, Delivered) or verdict.seconds is not None:
        return verdict
    return replace(verdict, seconds=seconds)


def failed(batch: Sequence[StoredEvent], reason: str, code: str, seconds: float) -> list[Verdict]:
    """Return the verdicts of a call that had none.

    A single event is the likely cause: the attempt counts. Of several none is known to be: all stay, and the relay goes
    on with one of them alone.
    """
    attempt = Attempt(code, seconds)
    if len(batch) == 1:
        return [Failed(reason, attempt=attempt)]
    return [Unavailable(reason, attempt=attempt) for _ in batch]
