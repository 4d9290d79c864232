"""The requests that plan or do an action: a page with a form, and its answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from outbox_relay.domain.errors import NotFound
from outbox_relay.ui import forms, reads
from outbox_relay.ui.actions import ACTIONS
from outbox_relay.ui.guard import BODY
from outbox_relay.ui.jobs import Job
from outbox_relay.ui.plans import Action, By
from outbox_relay.ui.render import CSRF_FIELD, error_page, has_token, may_act, page, redirect, site_of, user_of

SOON_SECONDS: Final = 2.0
"""Time for which the answer to an action waits for its end. After that, its page shows how far it is."""


def action_of(request: Request) -> Action:
    """Return the action that the path names. Raises ``NotFound``."""
    if (found := ACTIONS.get(request.path_params["action"])) is None:
        raise NotFound(f"there is no such action; there are {', '.join(ACTIONS)}")
    return found


def plan(request: Request) -> Response:
    """Show what an action would do, and the form that asks for it."""
    if not may_act(request):
        return error_page(request, 403, "only an operator may do this, and not on a read-only page")
    fields = reads.fields_of(request)
    site, action = site_of(request), action_of(request)
    forms.refuse_unknown(fields, [forms.KEY_HASH if name == "key" else name for name in action.names])
    store = site.store()
    found = action.plan(store, site.keys.resolve(store, fields))
    kept = {name: value for name, value in fields.items() if name not in {each.name for each in found.inputs}}
    values = {**asdict(found), "inputs": found.inputs, "kept": kept, "hidden_inputs": "uid" in fields}
    return page(request, "confirm.html", values)


def act(request: Request) -> Response:
    """Do an action, and lead to the page that tells its result."""
    fields = forms.read_fields(request.scope[BODY])
    if not has_token(request, fields):
        reason = "this form is too old, or was not made for you: go back, reload the page, and try again"
        return error_page(request, 403, reason)
    given = {name: value for name, value in fields.items() if name != CSRF_FIELD}
    job = start(request, given)
    return redirect(request, f"/jobs/{job.id}")


def start(request: Request, fields: Mapping[str, str]) -> Job:
    """Plan an action again, begin it, and return it, ended if that takes no time.

    Raises what the plan raises, and ``TooManyJobs``.
    """
    site, user, action = site_of(request), user_of(request), action_of(request)
    store = site.store()
    forms.refuse_unknown(fields, (*action.names, "reason"))
    by = By(f"{user.name}@page", fields.get("reason", "").strip() or None)
    planned = action.plan(store, fields)
    job = site.jobs.start(planned.title, user.name, planned.back, lambda report: action.run(store, fields, by, report))
    site.jobs.wait(job, SOON_SECONDS)
    return job
