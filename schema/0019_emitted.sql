-- A function for the tests of applications. Relays made for version 2 work on this schema.

-- The events that the calling transaction has emitted so far, in that order: those that are recorded under the caller's
-- present role, including those that triggers and SECURITY DEFINER functions emitted. An application's role may not read the
-- log, and its tests ask what the code has emitted. Needs no transaction id, and takes none.
--
-- A restored log has events with the transaction ids of another cluster, which come again here. So only events that are not
-- older than the transaction count, with a minute for a clock that was set back.
create function outbox.emitted() returns table (
    uid uuid, type text, key text, payload bytea, content_type text, headers jsonb, deliver_at timestamptz
)
language plpgsql stable security definer rows 10
set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
begin
    return query
    select e.uid, e.type, e.key, e.payload, e.content_type, e.headers, e.deliver_at
      from outbox.event e
     where e.xid = pg_current_xact_id_if_assigned() and e.emitter = outbox.emitter()
       and e.created_at >= now() - interval '1 minute'
     order by e.id;
end
$$;
