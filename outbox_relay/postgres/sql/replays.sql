-- The replays, newest first.
select id, sink, target, redirected, state, type, key, since, until, uids, rate, total, total_exact, delivered, failed,
       waiting, dropped, passed_by, created_at, ended_at, actor, role_name, reason, target_paused, relays, shards_left, tenant
  from outbox.replays(%(replay)s::bigint, %(unfinished)s, %(most)s::integer)
