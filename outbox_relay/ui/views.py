"""The table of views: what the pages show and the API answers. Each is read once for both, and described once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from starlette.requests import Request

from outbox_relay.ui import delivery_views, log_views, sink_views
from outbox_relay.ui.forms import SHOWN_NAMES


class View(NamedTuple):
    """A value that the API answers with, and that a page shows if there is a ``template``.

    ``shape`` is the name of its schema in ``openapi.SHAPES``, and ``query`` are the fields that its URL may have.
    """

    read: Callable[[Request, Mapping[str, str]], dict[str, Any]]
    summary: str
    shape: str
    query: Sequence[str] = ()
    template: str | None = None


VIEWS: Final[Mapping[str, View]] = {
    "/sinks": View(sink_views.sinks, "Every sink", "Sinks"),
    "/sinks/{name}": View(sink_views.sink, "One sink", "Sink", ("period",), "sink.html"),
    "/doctor": View(log_views.doctor, "The newest findings", "Findings"),
    "/exceptions": View(
        delivery_views.exceptions, "Deliveries that a filter selects, newest event first", "Deliveries",
        (*SHOWN_NAMES, "before"),
    ),
    "/exceptions/summary": View(
        delivery_views.summary, "The same by sink, type and kind of error", "Summary", SHOWN_NAMES
    ),
    "/events/{uid}": View(
        delivery_views.event, "An event, and its state in each sink", "Event", template="event.html"
    ),
    "/replays": View(log_views.replays, "The replays, newest first", "Replays", template="replays.html"),
    "/replays/{id}": View(log_views.replay, "One replay", "Replay"),
    "/schedules": View(
        log_views.schedules, "Schedules by name, from the one after a name", "Schedules", ("after",), "schedules.html"
    ),
    "/relays": View(
        log_views.relays, "The live relays, and what they deliver", "Relays", template="relays.html"
    ),
    "/database": View(log_views.database, "The log and the server", "Database", template="database.html"),
    "/audit": View(log_views.audit, "The newest actions", "Audit", ("since",), "audit.html"),
    "/jobs/{id}": View(log_views.job, "An action that was asked for", "Job", template="job.html"),
}  # fmt: skip
"""The views by the path of their page, and of the API below its prefix."""
