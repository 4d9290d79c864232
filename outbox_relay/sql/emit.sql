-- Emits one event, in a transaction of its own.
select outbox.emit_raw(
    %(type)s::text, %(payload)s::bytea, key => %(key)s::text, headers => %(headers)s::jsonb, uid => %(uid)s::uuid,
    content_type => %(content_type)s::text)::text as uid
