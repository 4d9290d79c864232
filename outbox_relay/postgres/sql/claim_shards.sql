-- Claim up to `most` free shards if the sink has these patterns and this claim: after a restore, its generation may be a number
-- that was given out before, for others. Nothing is claimed without a session of this relay. A shard at the last epoch can have no
-- further owner.
--
-- A shard is free if it has no owner, if the session of its owner has ended, or if it is this relay's and not one of those that it
-- knows of, as after a claim without an answer. Those are claimed first, and all of them. An ended session is locked and looked at
-- again, so that its relay either renews it first or finds its shards lost. Nothing is waited for. A shard that another relay
-- leaves without an outcome counts as a crash.
with mine as materialized (
    select 1 from outbox.session n
     where n.sink = %(sink)s and n.owner = %(owner)s::uuid and n.lease_until > clock_timestamp()
       for key share skip locked
),
ended as materialized (
    select n.owner from outbox.session n
     where n.sink = %(sink)s and n.owner <> %(owner)s::uuid and n.lease_until <= clock_timestamp()
       for update skip locked
),
free as materialized (  -- asked for once, whatever the plan
    select c.shard, c.epoch, coalesce(c.owner = %(owner)s::uuid, false) as is_mine
      from outbox.shard c
      left join ended e on e.owner = c.owner
     where c.sink = %(sink)s and c.epoch < 9223372036854775807
       and (c.owner is null or e.owner is not null
            or (c.owner = %(owner)s::uuid and c.shard <> all (%(known)s::smallint[]))
            or not exists (select from outbox.session n where n.sink = c.sink and n.owner = c.owner))
       and exists (select from mine)
       and (exists (select from outbox.sink k
                     where k.name = %(sink)s and not k.paused and k.generation = %(generation)s::bigint
                       and (%(patterns)s::text[] is null or (k.patterns = %(patterns)s and k.claim = %(claim)s::text)))
            or exists (select from outbox.replay r join outbox.sink k on k.name = r.target
                        where r.id = outbox_internal.replay_of(%(sink)s) and r.state = 'running' and not k.paused
                          and k.generation = %(generation)s::bigint))
),
taken as materialized (  -- at the epoch that was seen: another relay may have claimed it since
    select c.shard
      from outbox.shard c
      join free f on f.shard = c.shard and f.epoch = c.epoch
     where c.sink = %(sink)s
     order by f.is_mine desc, c.shard
     limit greatest(%(most)s::integer, (select count(*) from free f where f.is_mine))
       for update of c skip locked
)
update outbox.shard s
   set owner = %(owner)s::uuid,
       epoch = s.epoch + 1,
       generation = %(generation)s::bigint,
       crashes = least(s.crashes::bigint + (s.owner is not null and s.owner <> %(owner)s::uuid
                                          and not outbox_internal.known_down(s.sink))::integer, 2147483647)
  from taken
 where s.sink = %(sink)s and s.shard = taken.shard
returning s.shard, s.epoch, s.crashes
