-- The newest actions since a time.
select a.id, a.at, a.role_name, a.login, a.actor, a.action, a.sink, a.filter, a.count, a.reason
  from outbox.audit a
 where %(since)s::text is null or a.at >= outbox_internal.past_time('since', to_jsonb(%(since)s::text), now())
 order by a.at desc, a.id desc
 limit %(most)s::integer
