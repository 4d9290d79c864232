"""The endpoints of the page and of its API below ``/api/v1``: views, searches, and actions."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final, cast

from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response

from outbox_relay.domain.errors import ConfigurationError, NotFound
from outbox_relay.ui import forms
from outbox_relay.ui.actions import ACTIONS, Action, By
from outbox_relay.ui.guard import BODY, BY_TOKEN
from outbox_relay.ui.jobs import Job
from outbox_relay.ui.openapi import document
from outbox_relay.ui.render import (
    CSRF_FIELD,
    error_page,
    fields_of,
    has_token,
    may_act,
    page,
    redirect,
    root_of,
    site_of,
    user_of,
)
from outbox_relay.ui.views import View

PREFIX: Final = "/api/v1"
STATIC: Final = Path(__file__).parent / "static"
STATIC_FILES: Final = ("htmx.min.js", "icon.svg", "page.css", "page.js")
SOON_SECONDS: Final = 2.0
"""Time for which the answer to an action waits for its end. After that, its page shows how far it is."""


async def static(request: Request) -> Response:
    """Send a file of the page."""
    if (name := request.path_params["name"]) not in STATIC_FILES:
        raise NotFound("there is no such file")
    return FileResponse(STATIC / name)


def shown(view: View) -> Callable[[Request], Response]:
    """Return the endpoint of the page of ``view``."""
    return lambda request: page(request, view.template or "", view.read(request, fields_of(request, view.query)))


def answered(view: View) -> Callable[[Request], Response]:
    """Return the endpoint of the API that answers with ``view``."""

    def answer(request: Request) -> Response:
        fields = fields_of(request, view.query)
        forms.refuse_empty(fields)
        return _json(view.read(request, fields))

    return answer


def openapi(request: Request) -> Response:
    """Answer with the description of the API."""
    return _json(document(root_of(request) + PREFIX))


def search(request: Request) -> Response:
    """Lead to the event, the sink or the deliveries of the key that a text names. A POST: no URL contains a key."""
    text = forms.read_fields(request.scope[BODY]).get("q", "").strip()
    if not text:
        raise ConfigurationError("enter a uid, a key or the name of a sink")
    store = site_of(request).store()
    if forms.is_uid(text) and store.named("is_known", {"uid": forms.read_uid(text)})[0].known:
        return redirect(request, f"/events/{forms.read_uid(text)}")
    if text in {row.name for row in store.named("sink_names", {})}:
        return redirect(request, f"/sinks/{text}")
    return redirect(request, f"/exceptions?{forms.KEY_HASH}={site_of(request).keys.hash(text)}&state={forms.ALL}")


def plan(request: Request) -> Response:
    """Show what an action would do, and the form that asks for it."""
    if not may_act(request):
        return error_page(request, 403, "only an operator may do this, and not on a read-only page")
    site, action = site_of(request), _action(request)
    fields = fields_of(request, [forms.KEY_HASH if name == "key" else name for name in action.names])
    found = action.plan(site.store(), site.keys.resolve(fields))
    kept = {name: value for name, value in fields.items() if name not in {each.name for each in found.inputs}}
    values = {**asdict(found), "inputs": found.inputs, "kept": kept, "hidden_inputs": "uid" in fields}
    return page(request, "confirm.html", values)


def act(request: Request) -> Response:
    """Do an action, and lead to the page that tells its result."""
    fields = forms.read_fields(request.scope[BODY])
    if not has_token(request, fields.pop(CSRF_FIELD, "")):
        reason = "this form is too old, or was not made for you: go back, reload the page, and try again"
        return error_page(request, 403, reason)
    return redirect(request, f"/jobs/{_begin(request, fields).id}")


def answer_action(request: Request) -> Response:
    """Plan an action with ``dry_run``, or begin it and answer with its job.

    Raises what the plan raises, and the same if the action refuses a value at once.
    """
    fields, dry_run = _body(request.scope[BODY])
    if not request.scope[BY_TOKEN] and not has_token(request, request.headers.get("x-csrf-token", "")):
        return JSONResponse({"error": "without a bearer token, X-CSRF-Token must have the token of a form"}, 403)
    if dry_run:
        action = _action(request)
        forms.refuse_unknown(fields, (*action.names, "reason"))
        planned = action.plan(site_of(request).store(), fields)
        names = ("title", "effects", "possible", "fields", "reason_required")
        return _json({name: getattr(planned, name) for name in names})
    job = _begin(request, fields)
    if job.refusal is not None:
        raise job.refusal
    return _json(job.as_dict(), 202 if job.state == "running" else 200)


def _action(request: Request) -> Action:
    """Return the action that the path names. Raises ``NotFound``."""
    if (found := ACTIONS.get(request.path_params["action"])) is None:
        raise NotFound(f"there is no such action; there are {', '.join(ACTIONS)}")
    return found


def _begin(request: Request, fields: Mapping[str, str]) -> Job:
    """Plan an action again, begin it, and return it, ended if that takes no time.

    Raises what the plan raises, and ``TooManyJobs``.
    """
    site, user, action = site_of(request), user_of(request), _action(request)
    store = site.store()
    forms.refuse_unknown(fields, (*action.names, "reason"))
    by = By(actor=f"{user.name}@page", reason=fields.get("reason", "").strip() or None)
    planned = action.plan(store, fields)
    job = Job(planned.title, user.name, planned.back)
    site.jobs.start(job, lambda report: action.run(store, fields, by, report))
    job.ended.wait(SOON_SECONDS)
    return job


def _json(content: Mapping[str, Any], status: int = 200) -> Response:
    return Response(json.dumps(content, default=str), status, media_type="application/json")


def _body(body: bytes) -> tuple[dict[str, str], bool]:
    """Return the fields of an action as texts, and ``dry_run``. Raises ``ConfigurationError``."""
    try:
        given = json.loads(body, object_pairs_hook=_once)
    except (ValueError, RecursionError):
        given = None
    if not isinstance(given, dict):
        raise ConfigurationError("the body should be a JSON object")
    values = cast("dict[str, object]", given)
    dry_run = values.pop("dry_run", False)
    if not isinstance(dry_run, bool):
        raise ConfigurationError("dry_run should be true or false")
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
