-- A tick, and the window that ends at it, in a transaction of its own: never together with a statement that writes.
select seq, snapshot, next_xid, incarnation, now, generations, read,
       id, shard, uid, type, key, payload, content_type, headers, deliver_at, created_at, fault, tenant
  from outbox_internal.look_small(%(a_seq)s::bigint, %(a)s::pg_snapshot, %(a_next)s::bigint, %(floor)s::bigint,
                         %(shards)s::smallint[], %(types)s::text[], %(most_ids)s::bigint, %(most_events)s::integer,
                         %(most_bytes)s::bigint, %(most_payload)s::bigint, %(most_size)s::integer,
                         %(known)s::text)
