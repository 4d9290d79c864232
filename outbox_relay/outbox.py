import json
from dataclasses import dataclass
from typing import Any
@dataclass(frozen=True, slots=True)
class Event:
    type: str
    payload: Any
    key: Any = None
    headers: Any = None
    deliver_at: Any = None
    uid: Any = None
def emit_many(conn, events):
    cur = conn.cursor()
    cur.execute("select outbox.emit_raw(t,p,k,null,null,null,'application/json') from unnest(%s::text[],%s::bytea[],%s::text[]) x(t,p,k)", ([e.type for e in events],[json.dumps(e.payload).encode() for e in events],[e.key for e in events]))
    return [r[0] for r in cur.fetchall()]
