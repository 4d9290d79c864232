"""The OpenAPI document of the API. Tests compare it with what the API answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from outbox_relay import __version__
from outbox_relay.admin.deliveries import STATES
from outbox_relay.ui.actions import ACTIONS, RATE_MOST
from outbox_relay.ui.forms import LISTED
from outbox_relay.ui.view_sinks import RANGES

Schema = dict[str, Any]

TEXT: Final[Schema] = {"type": "string"}
INTEGER: Final[Schema] = {"type": "integer"}
NUMBER: Final[Schema] = {"type": "number"}
BOOLEAN: Final[Schema] = {"type": "boolean"}
TIME: Final[Schema] = {"type": "string", "format": "date-time"}
UID: Final[Schema] = {"type": "string", "format": "uuid"}
ANY: Final[Schema] = {"type": "object"}


def _or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def _list(schema: Schema) -> Schema:
    return {"type": "array", "items": schema}


def _map(schema: Schema) -> Schema:
    return {"type": "object", "additionalProperties": schema}


def _object(**properties: Schema) -> Schema:
    """Return the schema of an object that has exactly these properties."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


STEP: Final = _object(
    age=INTEGER, delivered=INTEGER, failed=INTEGER, dead=INTEGER, backlog=_or_null(INTEGER),
    **dict.fromkeys(("oldest", "p50", "p99", "claim_p99", "tick_p99", "settle_p99", "busy_ms"), _or_null(NUMBER)),
)  # fmt: skip
HISTORY: Final = _object(step_seconds=NUMBER, steps=INTEGER, minutes=_list(STEP))
SINK_FIELDS: Final[Mapping[str, Schema]] = {
    "name": TEXT,
    "patterns": _list(TEXT),
    "state": _object(level={"enum": ["ok", "warning", "critical", "off"]}, word=TEXT, reason=TEXT),
    "paused": BOOLEAN,
    "paused_reason": _or_null(TEXT),
    "circuit": {"enum": ["closed", "open", "half-open"]},
    "circuit_seconds": _or_null(NUMBER),
    "in_flight_limit": _or_null(INTEGER),
    "last_error": _or_null(TEXT),
    "error_seconds": _or_null(NUMBER),
    "unowned": INTEGER,
    "rate_per_second": _or_null(NUMBER),
    "max_in_flight_total": _or_null(INTEGER),
    "spread_seconds": _or_null(NUMBER),
    "oldest_seconds": _or_null(NUMBER),
    "position_lag_seconds": _or_null(NUMBER),
    **dict.fromkeys(("backlog", *STATES), _or_null(INTEGER)),
}
HOUR: Final = _object(
    delivered=INTEGER, failed=INTEGER, dead=INTEGER, p50=_or_null(NUMBER), p99=_or_null(NUMBER), minutes=_list(INTEGER)
)
GROUP: Final = _object(
    sink=TEXT, type=TEXT, state=TEXT, error=_or_null(TEXT), status=_or_null(INTEGER), example=_or_null(TEXT),
    count=INTEGER, first=_or_null(TIME), last=_or_null(TIME),
)  # fmt: skip
LAST_ERROR: Final = _object(
    at=_or_null(TIME), error=TEXT, status=_or_null(INTEGER), uid=_or_null(UID), type=_or_null(TEXT),
    state=_or_null(TEXT), attempts=_or_null(INTEGER),
)  # fmt: skip
SHARD: Final = _object(
    shard=INTEGER, relay=_or_null(TEXT), lease_seconds=NUMBER, crashes=INTEGER, behind=_or_null(INTEGER)
)
SETTINGS: Final = _object(relay=TEXT, version=TEXT, settings=ANY)
DELIVERY: Final[Mapping[str, Schema]] = {
    "uid": UID, "sink": TEXT, "type": TEXT, "key": _or_null(TEXT), "state": {"enum": list(STATES)}, "attempts": INTEGER,
    "error": _or_null(TEXT), "status": _or_null(INTEGER), "since": _or_null(TIME), "due_at": _or_null(TIME),
    "last_attempt_at": _or_null(TIME),
}  # fmt: skip
EXPORTED: Final = _object(
    uid=UID, sink=TEXT, type=TEXT, key=_or_null(TEXT), state={"enum": list(STATES)}, attempts=INTEGER,
    error=_or_null(TEXT), status=_or_null(INTEGER), content_type=_or_null(TEXT), since=_or_null(TIME), created_at=TIME,
    deliver_at=_or_null(TIME), headers=_or_null(ANY), payload=_or_null(TEXT),
    payload_encoding={"enum": ["utf-8", "base64", None]},
)  # fmt: skip
RELAY: Final = _object(name=TEXT, version=TEXT, seen_seconds_ago=NUMBER, stale=BOOLEAN, shards=_map(INTEGER))
RUNNING: Final = _object(
    uid=UID, sink=TEXT, type=TEXT, key=_or_null(TEXT), relay=TEXT, attempt=INTEGER, since=_or_null(TIME),
    running_seconds=_or_null(NUMBER), lease_seconds=NUMBER,
)  # fmt: skip
REPLAY: Final = _object(
    id=INTEGER, sink=TEXT, to=_or_null(TEXT), state={"enum": ["running", "paused", "done", "cancelled"]}, total=INTEGER,
    total_exact=BOOLEAN, delivered=INTEGER, failed=INTEGER, waiting=INTEGER, dropped=INTEGER,
    passed_by=_or_null(INTEGER), waits_for=_or_null(TEXT), rate=_or_null(INTEGER), type=_or_null(TEXT),
    key=_or_null(TEXT), tenant=_or_null(TEXT), since=_or_null(TIME), until=_or_null(TIME), uids=_or_null(INTEGER),
    started_at=TIME, ended_at=_or_null(TIME), actor=TEXT, reason=_or_null(TEXT),
)  # fmt: skip
SCHEDULE: Final = _object(
    name=TEXT, cron=TEXT, timezone=TEXT, type=TEXT, key=_or_null(TEXT), tenant=_or_null(TEXT),
    missed={"enum": ["one", "skip", "all"]}, state={"enum": ["active", "paused"]}, next_at=_or_null(TIME),
    last_at=_or_null(TIME), late_seconds=_or_null(NUMBER), error=_or_null(TEXT), error_at=_or_null(TIME),
    retry_at=_or_null(TIME), generation=INTEGER,
)  # fmt: skip
FINDING: Final = _object(
    id=TEXT, severity={"enum": ["critical", "warning", "ok"]}, summary=TEXT, evidence=TEXT, advice=TEXT,
    statements=_list(TEXT), runbook=TEXT,
)  # fmt: skip
ATTEMPT: Final = _object(
    at=TIME, sink=TEXT, number=INTEGER, relay=_or_null(TEXT), outcome=TEXT, status=_or_null(INTEGER),
    milliseconds=_or_null(NUMBER), error=_or_null(TEXT), detail=_or_null(ANY),
)  # fmt: skip
EVENT: Final[Schema] = {
    "type": "object",
    "properties": {
        "uid": UID, "id": INTEGER, "type": _or_null(TEXT), "key": _or_null(TEXT), "in_log": BOOLEAN,
        "tenant": _or_null(TEXT), "priority": _or_null(INTEGER),
        "sinks": _map({"type": "object", "properties": {"state": TEXT}, "required": ["state"]}),
        "attempts": _list(ATTEMPT), "content": _or_null(ANY),
    },
    "required": ["uid", "id", "type", "sinks", "attempts", "content"],
}  # fmt: skip
TRANSACTION: Final = _object(who=TEXT, seconds=NUMBER, held=_or_null(INTEGER), ending=TEXT, dead=INTEGER)
LOCK: Final = _object(
    pid=INTEGER, role_name=TEXT, object=TEXT, seconds=NUMBER, blockers=_list(INTEGER), endings=_list(TEXT)
)
TABLE: Final = _object(name=TEXT, live=INTEGER, dead=INTEGER, bytes=INTEGER, parts=INTEGER, vacuumed_at=_or_null(TIME))
AUDIT: Final = _object(
    at=TIME, role=TEXT, id=INTEGER, action=TEXT, sink=_or_null(TEXT), filter=_or_null(ANY), count=INTEGER,
    reason=_or_null(TEXT), actor=_or_null(TEXT), login=_or_null(TEXT),
)  # fmt: skip
JOB: Final = _object(
    id=TEXT, title=TEXT, user=TEXT, state={"enum": ["running", "done", "failed"]}, done=INTEGER, result=_or_null(TEXT)
)
PLAN: Final = _object(title=TEXT, effects=_list(TEXT), possible=BOOLEAN, fields=_map(TEXT), reason_required=BOOLEAN)
AGE: Final[Mapping[str, Schema]] = {"figures_age_seconds": _or_null(NUMBER)}
ERROR: Final = _object(error=TEXT)

FILTER: Final = ("sink", "type", "tenant", "error", "kind", "status", "since", "until", "state", "uid")
SHOWN: Final = (*FILTER, "key_hash")
ANSWERS: Final[Mapping[str, tuple[str, Schema, tuple[str, ...]]]] = {
    "/sinks": ("Every sink", _object(sinks=_list(_object(**SINK_FIELDS, hour=HOUR)), **AGE), ()),
    "/sinks/{name}": (
        "One sink",
        _object(
            **SINK_FIELDS, **AGE, start=_or_null(TEXT), since=_or_null(TIME),
            relays=_or_null(_list(_object(name=TEXT, serves=BOOLEAN))),
            shards=_list(SHARD), last_errors=_list(LAST_ERROR), errors=_or_null(_list(GROUP)), errors_exact=BOOLEAN,
            history=HISTORY, settings=_or_null(_list(SETTINGS)),
        ),
        ("period",),
    ),
    "/doctor": (
        "The newest findings",
        _object(findings=_or_null(_list(FINDING)), age_seconds=_or_null(NUMBER), error=_or_null(TEXT)),
        (),
    ),
    "/exceptions": (
        "Deliveries that a filter selects, newest event first",
        _object(
            deliveries=_list(_object(**DELIVERY, key_hash=_or_null(TEXT))),
            complete=BOOLEAN,
            next=_or_null(_object(id=INTEGER, sink=TEXT)),
        ),
        (*SHOWN, "before"),
    ),
    "/exceptions/summary": (
        "The same by sink, type and kind of error", _object(groups=_or_null(_list(GROUP)), exact=BOOLEAN), SHOWN
    ),
    "/events/{uid}": ("An event, and its state in each sink", EVENT, ()),
    "/keys/{hash}": (
        "The deliveries of a key in their order, and its events, newest first",
        _object(
            key=TEXT, sinks=_map(_list(_object(**DELIVERY))), complete=BOOLEAN, events=_list(ANY),
            next=_or_null(INTEGER), searched_since=_or_null(TIME),
        ),
        ("before",),
    ),
    "/replays": ("The replays, newest first", _object(replays=_list(REPLAY)), ()),
    "/replays/{id}": ("One replay", REPLAY, ()),
    "/schedules": (
        "Schedules by name, from the one after a name",
        _object(schedules=_list(SCHEDULE), next=_or_null(TEXT)),
        ("after",),
    ),
    "/relays": ("The live relays, and what they deliver", _object(relays=_list(RELAY), running=_list(RUNNING)), ()),
    "/database": (
        "The log and the server",
        _object(
            **AGE, log_bytes=_or_null(INTEGER), default_partition_rows=_or_null(INTEGER),
            oldest_transaction_seconds=_or_null(NUMBER), lock_waits=_or_null(INTEGER), retention=_or_null(ANY),
            tables=_or_null(_list(TABLE)), transactions=_or_null(_list(TRANSACTION)), sees_all=BOOLEAN,
            locks=_or_null(_list(LOCK)),
            signals=HISTORY, unread=_map(TEXT),
        ),
        (),
    ),
    "/audit": ("The newest actions", _object(audit=_list(AUDIT)), ("since",)),
    "/jobs/{id}": ("An action that was asked for", JOB, ()),
}  # fmt: skip
"""Path: (summary, schema of the answer, parameters of the query)"""
STATUSES: Final = {
    "400": "A wrong value", "401": "No user", "403": "Not allowed", "404": "Not found", "405": "Another method",
    "413": "Too large", "421": "Another host", "429": "Too many", "503": "No answer",
}  # fmt: skip


def document(server: str) -> Schema:
    """Return the document of an API whose paths begin with ``server``."""
    paths = {path: {"get": _get(path, *answer)} for path, answer in ANSWERS.items()}
    paths["/exceptions/export"] = {"get": _export()}
    return {
        "openapi": "3.1.0",
        "info": {"title": "outbox-relay", "version": __version__, "description": "What the page shows and does."},
        "servers": [{"url": server}],
        "paths": {**paths, "/actions/{action}": {"post": _post()}},
        "components": {
            "securitySchemes": {
                "token": {"type": "http", "scheme": "bearer"},
                "password": {"type": "http", "scheme": "basic"},
            }
        },
        "security": [{"token": []}, {"password": []}],
    }


def _get(path: str, summary: str, schema: Schema, query: tuple[str, ...]) -> Schema:
    parameters = [{"name": name, "in": "path", "required": True, "schema": TEXT} for name in _names(path)]
    parameters += [{"name": name, "in": "query", "schema": _query_schema(name)} for name in query]
    return {"summary": summary, "parameters": parameters, "responses": {"200": _content(summary, schema), **_errors()}}


def _export() -> Schema:
    """Return the operation whose answer is no JSON but a line of it per delivery."""
    summary = "The same with payloads, an object per line, for operators if the page shows payloads"
    found = _get("/exceptions/export", summary, EXPORTED, SHOWN)
    found["responses"]["200"]["content"] = {"application/jsonl": {"schema": EXPORTED}}
    return found


def _names(path: str) -> list[str]:
    return [part[1:-1] for part in path.split("/") if part.startswith("{")]


def _query_schema(name: str) -> Schema:
    match name:
        case "state":
            return {"enum": list(LISTED)}
        case "period":
            return {"enum": list(RANGES)}
        case "status" | "counted":
            return INTEGER
        case _:
            return TEXT


def _post() -> Schema:
    names = (*FILTER, "key", "to", "id", "schedule", "as_of", "counted", "reason")
    rate = {"type": "integer", "minimum": 1, "maximum": RATE_MOST}
    body = {
        "type": "object",
        "additionalProperties": False,
        "properties": {
            **{name: _query_schema(name) for name in names},
            "state": {"enum": list(STATES)},
            "rate": rate,
            "dry_run": BOOLEAN,
        },
    }
    parameter = {"name": "action", "in": "path", "required": True, "schema": {"enum": list(ACTIONS)}}
    return {
        "summary": "Do an action, or with dry_run say what it would do",
        "parameters": [parameter],
        "requestBody": {"content": {"application/json": {"schema": body}}},
        "responses": {
            "200": _content("The action that has ended, or the dry run", {"anyOf": [JOB, PLAN]}),
            "202": _content("The action, which runs", JOB),
            **_errors(),
        },
    }


def _errors() -> Schema:
    return {status: _content(text, ERROR) for status, text in STATUSES.items()}


def _content(description: str, schema: Schema) -> Schema:
    return {"description": description, "content": {"application/json": {"schema": schema}}}
