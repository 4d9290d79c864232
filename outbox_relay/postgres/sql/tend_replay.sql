-- Look after a replay, a step of each kind.
select outbox.tend_replay(%(replay)s::bigint)
