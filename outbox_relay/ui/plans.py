"""Actions of operators as the page asks for them: the fields, the dry run, and the result. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from outbox_relay.postgres.store import Store
from outbox_relay.ui.jobs import Report

Fields = Mapping[str, str]


class Input(NamedTuple):
    """A field that a person fills in before the action can be planned."""

    name: str
    label: str
    value: str
    placeholder: str = ""
    required: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """The effects that an action would have. It is only ``possible`` if there is something to do.

    ``fields`` are those with which it is asked for, and ``back`` is the path of the page that it is about.
    """

    title: str
    verb: str
    back: str
    effects: Sequence[str] = ()
    possible: bool = True
    fields: Mapping[str, str] = field(default_factory=dict[str, str])
    inputs: Sequence[Input] = ()
    reason_required: bool = False
    danger: bool = False


class By(NamedTuple):
    """The person who acts, as the audit names them, and their reason."""

    actor: str
    reason: str | None


class Action(NamedTuple):
    """An action: the fields that it has, its dry run, and what does it, which returns a sentence about the result."""

    names: Sequence[str]
    plan: Callable[[Store, Fields], Plan]
    run: Callable[[Store, Fields, By, Report], str]
