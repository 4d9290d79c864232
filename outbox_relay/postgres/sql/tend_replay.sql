-- Look after a replay, a step of each kind.
select outbox_internal.tend_replay(%(replay)s::bigint)
