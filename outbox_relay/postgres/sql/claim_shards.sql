-- Claim up to `most` shards that have had no owner for `free_for` seconds, if the sink has these patterns and this claim:
-- after a restore, its generation may be a number that was given out before, for others. An expired lease counts as a crash. A shard at
-- the last epoch can have no further owner: the others are claimed. The generation is that which this statement has seen.
with free as materialized (  -- asked for once, whatever the plan
    select c.shard
      from outbox.shard c
     where c.sink = %(sink)s and c.epoch < 9223372036854775807
       and c.lease_until <= clock_timestamp() - case when c.owner is null then %(free_for)s::double precision
                                                     else %(lapsed_for)s::double precision end * interval '1 second'
       and (exists (select from outbox.sink k
                     where k.name = %(sink)s and not k.paused and k.generation = %(generation)s::bigint
                       and (%(patterns)s::text[] is null or (k.patterns = %(patterns)s and k.claim = %(claim)s::text)))
            or exists (select from outbox.replay r join outbox.sink k on k.name = r.target
                        where r.id = outbox_internal.replay_of(%(sink)s) and r.state = 'running' and not k.paused
                          and k.generation = %(generation)s::bigint))
     order by c.shard
     limit %(most)s::integer
       for update skip locked
)
update outbox.shard s
   set owner = %(owner)s::uuid,
       epoch = s.epoch + 1,
       generation = %(generation)s::bigint,
       lease_until = clock_timestamp() + %(lease)s::double precision * interval '1 second',
       crashes = least(s.crashes::bigint + (s.owner is not null and not outbox_internal.known_down(s.sink))::integer, 2147483647)
  from free
 where s.sink = %(sink)s and s.shard = free.shard
returning s.shard, s.epoch, s.crashes
