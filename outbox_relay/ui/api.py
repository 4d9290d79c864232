"""The API: everything that the pages show and do, as JSON below ``/api/v1``."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any, Final, cast

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from outbox_relay.domain.errors import ConfigurationError
from outbox_relay.ui import act, forms, pages, reads
from outbox_relay.ui.guard import BODY, BY_TOKEN
from outbox_relay.ui.openapi import document
from outbox_relay.ui.render import CSRF_FIELD, has_token, root_of

PREFIX: Final = "/api/v1"
DRY_RUN: Final = "dry_run"


def answered(read: Callable[[Request], Mapping[str, Any]]) -> Callable[[Request], Response]:
    """Return the endpoint that answers with what ``read`` returns."""
    return lambda request: _json(read(request))


def action(request: Request) -> Response:
    """Plan an action with ``dry_run``, or begin it and answer with its job.

    Raises what the plan raises, and the same if the action refuses a value at once.
    """
    fields, dry_run = _body(request.scope[BODY])
    if not request.scope[BY_TOKEN] and not has_token(request, {CSRF_FIELD: request.headers.get("x-csrf-token", "")}):
        return JSONResponse({"error": "without a bearer token, X-CSRF-Token must have the token of a form"}, 403)
    if dry_run:
        forms.refuse_unknown(fields, (*act.action_of(request).names, "reason"))
        planned = act.action_of(request).plan(reads.store_of(request), fields)
        names = ("title", "effects", "possible", "fields", "reason_required")
        return _json({name: value for name, value in asdict(planned).items() if name in names})
    job = act.start(request, fields)
    if job.refusal is not None:
        raise job.refusal
    return _json(job.as_dict(), 202 if job.state == "running" else 200)


def openapi(request: Request) -> Response:
    """Answer with the description of this API."""
    return _json(document(root_of(request) + PREFIX))


def _json(content: Mapping[str, Any], status: int = 200) -> Response:
    return Response(json.dumps(content, default=str), status, media_type="application/json")


def _body(body: bytes) -> tuple[dict[str, str], bool]:
    """Return the fields of an action as texts, and ``dry_run``. Raises ``ConfigurationError``."""
    try:
        given = json.loads(body, object_pairs_hook=_once)
    except (ValueError, RecursionError):
        raise ConfigurationError("the body should be a JSON object") from None
    if not isinstance(given, dict):
        raise ConfigurationError("the body should be a JSON object")
    values = cast("dict[str, object]", given)
    dry_run = values.pop(DRY_RUN, False)
    if not isinstance(dry_run, bool):
        raise ConfigurationError(f"{DRY_RUN} should be true or false")
    fields = forms.single((name, _text(name, value)) for name, value in values.items())
    forms.refuse_empty(fields)
    return fields, dry_run


def _once(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Return the members of a JSON object. Raises ``ConfigurationError`` for a name that is given twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ConfigurationError("a field is given twice")
    return found


def _text(name: str, value: object) -> str:
    """Return the value of a field as the text that a form would have."""
    if not name.isascii():
        raise ConfigurationError(f"{name[:40]!a} means nothing here")
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise ConfigurationError(f"{name[:40]} should be a text or an integer")
    return str(value)


ENDPOINTS: Final[Mapping[str, Callable[[Request], Response]]] = {
    "/openapi.json": openapi,
    "/sinks": answered(reads.sinks),
    "/sinks/{name}": answered(reads.sink),
    "/doctor": answered(reads.doctor),
    "/exceptions": answered(reads.exceptions),
    "/exceptions/export": pages.export,
    "/exceptions/summary": answered(reads.summary),
    "/events/{uid}": answered(reads.event),
    "/keys/{hash}": answered(reads.key),
    "/replays": answered(reads.replays),
    "/replays/{id}": answered(reads.replay),
    "/schedules": answered(reads.schedules),
    "/relays": answered(reads.relays),
    "/database": answered(reads.database),
    "/audit": answered(reads.audit),
    "/jobs/{id}": answered(lambda request: reads.job(request).as_dict()),
}
"""The endpoints of GET by their path below ``PREFIX``."""
