"""The OpenAPI document of the API, from the table of views. Tests compare it with what the API answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from outbox_relay import __version__
from outbox_relay.admin.deliveries import STATES
from outbox_relay.ui import forms
from outbox_relay.ui.actions import ACTIONS, RATE_MOST
from outbox_relay.ui.sink_views import RANGES
from outbox_relay.ui.views import VIEWS

Schema = dict[str, Any]

TYPES: Final[Mapping[str, Schema]] = {
    "any": {},
    "boolean": {"type": "boolean"},
    "integer": {"type": "integer"},
    "number": {"type": "number"},
    "object": {"type": "object"},
    "text": {"type": "string"},
    "time": {"type": "string", "format": "date-time"},
    "uid": {"type": "string", "format": "uuid"},
}
SINK: Final = """
    name:text patterns:text[] state:Health paused:boolean paused_reason:text? circuit:Circuit circuit_seconds:number?
    in_flight_limit:integer? last_error:text? error_seconds:number? unowned:integer rate_per_second:number?
    max_in_flight_total:integer? spread_seconds:number? oldest_seconds:number? position_lag_seconds:number?
    backlog:integer? dead:integer? waiting:integer? held:integer? scheduled:integer?"""
DELIVERY: Final = """
    uid:uid sink:text type:text key:text? state:DeliveryState attempts:integer error:text? status:integer?
    since:time? due_at:time? last_attempt_at:time?"""
SHAPES: Final[Mapping[str, str]] = {
    "Attempt": """
        at:time sink:text number:integer relay:text? outcome:text status:integer? milliseconds:number? error:text?
        detail:object?""",
    "Audit": "audit:AuditedAction[]",
    "AuditedAction": """
        at:time role:text id:integer action:text sink:text? filter:object? count:integer reason:text? actor:text?
        login:text?""",
    "Circuit": "closed | open | half-open",
    "Database": """
        figures_age_seconds:number? log_bytes:integer? default_partition_rows:integer?
        oldest_transaction_seconds:number? lock_waits:integer? retention:object? tables:Table[]?
        transactions:Transaction[]? sees_all:boolean locks:Lock[]? signals:History unread:object""",
    "Deliveries": "deliveries:Delivery[] complete:boolean next:Place?",
    "Delivery": DELIVERY + " key_hash:text?",
    "DeliveryState": "dead | waiting | held | scheduled",
    "Error": "error:text",
    "Event": """
        uid:uid id:integer type:text? key:text? sinks:object attempts:Attempt[] content:object? ...""",
    "Exported": """
        uid:uid sink:text type:text key:text? state:DeliveryState attempts:integer error:text? status:integer?
        content_type:text? since:time? created_at:time deliver_at:time? headers:object? payload:text?
        payload_encoding:text?""",
    "Finding": """
        id:text severity:Severity summary:text evidence:text advice:text statements:text[] runbook:text""",
    "Findings": "findings:Finding[]? age_seconds:number? error:text?",
    "Group": """
        sink:text type:text state:text error:text? status:integer? example:text? count:integer first:time?
        last:time?""",
    "Health": "level:Level word:text reason:text",
    "History": "step_seconds:number steps:integer minutes:Minute[]",
    "Hour": "delivered:integer failed:integer dead:integer p50:number? p99:number? minutes:integer[]",
    "Job": "id:text title:text user:text page:text state:JobState done:integer result:text?",
    "JobState": "running | done | failed",
    "LastError": "at:time? error:text status:integer? uid:uid? type:text? state:text? attempts:integer?",
    "Level": "ok | warning | critical | off",
    "ListedSink": SINK + " hour:Hour",
    "Lock": "pid:integer role_name:text object:text seconds:number blockers:integer[] endings:text[]",
    "Minute": """
        age:integer delivered:integer failed:integer dead:integer backlog:integer? oldest:number? p50:number?
        p99:number? claim_p99:number? tick_p99:number? settle_p99:number? busy_ms:number?""",
    "Missed": "one | skip | all",
    "Place": "id:integer sink:text",
    "Plan": "title:text effects:text[] possible:boolean fields:object reason_required:boolean",
    "Relay": "name:text version:text seen_seconds_ago:number stale:boolean shards:object",
    "Relays": "relays:Relay[] running:Running[]",
    "Replay": """
        id:integer sink:text to:text? state:ReplayState total:integer total_exact:boolean delivered:integer
        failed:integer waiting:integer dropped:integer passed_by:integer? waits_for:text? rate:integer? type:text?
        key:text? tenant:text? since:time? until:time? uids:integer? started_at:time ended_at:time? actor:text
        reason:text?""",
    "ReplayState": "running | paused | done | cancelled",
    "Replays": "replays:Replay[]",
    "Running": """
        uid:uid sink:text type:text key:text? relay:text attempt:integer since:time? running_seconds:number?
        lease_seconds:number""",
    "Schedule": """
        name:text cron:text timezone:text type:text key:text? tenant:text? missed:Missed state:ScheduleState
        next_at:time? last_at:time? late_seconds:number? error:text? error_at:time? retry_at:time?
        generation:integer""",
    "ScheduleState": "active | paused",
    "Schedules": "schedules:Schedule[] next:text?",
    "Serving": "name:text serves:boolean",
    "Settings": "relay:text version:text settings:object",
    "Severity": "critical | warning | ok",
    "Shard": "shard:integer relay:text? lease_seconds:number? crashes:integer behind:integer?",
    "Sink": SINK + """
        figures_age_seconds:number? start:text? since:time? relays:Serving[]? shards:Shard[] last_errors:LastError[]
        errors:Group[]? errors_exact:boolean history:History settings:Settings[]?""",
    "Sinks": "sinks:ListedSink[] figures_age_seconds:number?",
    "Summary": "groups:Group[]? exact:boolean",
    "Table": "name:text live:integer dead:integer bytes:integer parts:integer vacuumed_at:time?",
    "Transaction": "who:text seconds:number held:integer? ending:text dead:integer",
}  # fmt: skip
"""The values of the API: NAME:TYPE for each property of an object, or the texts of an enumeration.

A type is one of ``TYPES`` or another shape, then ``[]`` for a list of it, and ``?`` if it may be null. ``...`` means
further properties, which docs/commands.md describes.
"""
STATUSES: Final[Mapping[str, str]] = {
    "400": "A wrong value", "401": "No user", "403": "Not allowed", "404": "Not found", "405": "Another method",
    "413": "Too large", "421": "Another host", "429": "Too many", "503": "No answer",
}  # fmt: skip
QUERY: Final[Mapping[str, Schema]] = {
    "state": {"enum": list(forms.LISTED)},
    "period": {"enum": list(RANGES)},
    "status": TYPES["integer"],
    "counted": TYPES["integer"],
}
"""The schemas of fields that are no texts."""


def document(server: str) -> Schema:
    """Return the document of an API whose paths begin with ``server``."""
    paths = {path: {"get": _get(path, view.summary, view.shape, view.query)} for path, view in VIEWS.items()}
    export = _get(
        "/exceptions/export", "The same with payloads, an object per line, for operators if the page shows payloads",
        "Exported", forms.SHOWN_NAMES, "application/jsonl",
    )  # fmt: skip
    return {
        "openapi": "3.1.0",
        "info": {"title": "outbox-relay", "version": __version__, "description": "What the page shows and does."},
        "servers": [{"url": server}],
        "paths": {**paths, "/exceptions/export": {"get": export}, "/actions/{action}": {"post": _post()}},
        "components": {
            "schemas": {name: _shape(shape) for name, shape in SHAPES.items()},
            "securitySchemes": {
                "token": {"type": "http", "scheme": "bearer"},
                "password": {"type": "http", "scheme": "basic"},
            },
        },
        "security": [{"token": []}, {"password": []}],
    }


def _shape(shape: str) -> Schema:
    """Return the schema of one of ``SHAPES``."""
    if "|" in shape:
        return {"enum": shape.split(" | ")}
    texts = shape.removesuffix(" ...").split()
    properties = {name: _type(type_name) for name, type_name in (each.split(":") for each in texts)}
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": shape.endswith(" ..."),
    }


def _type(name: str) -> Schema:
    if name.endswith("?"):
        return {"anyOf": [_type(name[:-1]), {"type": "null"}]}
    if name.endswith("[]"):
        return {"type": "array", "items": _type(name[:-2])}
    return TYPES.get(name) or {"$ref": f"#/components/schemas/{name}"}


def _get(path: str, summary: str, shape: str, query: Sequence[str], media: str = "application/json") -> Schema:
    names = [part[1:-1] for part in path.split("/") if part.startswith("{")]
    parameters = [{"name": name, "in": "path", "required": True, "schema": TYPES["text"]} for name in names]
    parameters += [{"name": name, "in": "query", "schema": QUERY.get(name, TYPES["text"])} for name in query]
    return {"summary": summary, "parameters": parameters, "responses": _responses({"200": (summary, shape)}, media)}


def _post() -> Schema:
    names = dict.fromkeys(name for action in ACTIONS.values() for name in action.names)
    properties: Schema = {
        **{name: QUERY.get(name, TYPES["text"]) for name in (*names, "reason")},
        "state": {"enum": list(STATES)},
        "rate": {"type": "integer", "minimum": 1, "maximum": RATE_MOST},
        "dry_run": TYPES["boolean"],
    }
    body = {"type": "object", "additionalProperties": False, "properties": properties}
    done = {"200": ("The action that has ended, or the dry run", "Job Plan"), "202": ("The action, which runs", "Job")}
    return {
        "summary": "Do an action, or with dry_run say what it would do",
        "parameters": [{"name": "action", "in": "path", "required": True, "schema": {"enum": list(ACTIONS)}}],
        "requestBody": {"content": {"application/json": {"schema": body}}},
        "responses": _responses(done),
    }


def _responses(done: Mapping[str, tuple[str, str]], media: str = "application/json") -> Schema:
    """Return the answers by status: those of ``done`` with the names of their shapes, and the errors."""
    errors = {status: _content(text, "Error", "application/json") for status, text in STATUSES.items()}
    return {status: _content(text, shapes, media) for status, (text, shapes) in done.items()} | errors


def _content(description: str, shapes: str, media: str) -> Schema:
    return {"description": description, "content": {media: {"schema": {"anyOf": [*map(_type, shapes.split())]}}}}
