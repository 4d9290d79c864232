-- Claims up to `most` shards that nobody has owned for `free_for` seconds. A lapsed lease counts as a crash, but not
-- while the destination is known to be down: then nothing moves a position, whatever the owners die of, and what is known
-- is said again at least every minute.
update outbox.shard s
   set owner = %(owner)s::uuid,
       epoch = s.epoch + 1,
       lease_until = clock_timestamp() + %(lease)s::double precision * interval '1 second',
       crashes = s.crashes + (s.owner is not null and not free.down)::integer
  from (
    select c.shard,
           coalesce(k.circuit <> 'closed' and k.last_error_at > clock_timestamp() - interval '90 seconds', false) as down
      from outbox.shard c
      join outbox.sink k on k.name = c.sink
     where c.sink = %(sink)s
       and c.lease_until <= clock_timestamp() - case when c.owner is null then %(free_for)s::double precision
                                                     else %(lapsed_for)s::double precision end * interval '1 second'
       and not k.paused and k.generation = %(generation)s::bigint
     order by c.shard
     limit %(most)s::integer
       for update of c skip locked
  ) free
 where s.sink = %(sink)s and s.shard = free.shard
returning s.shard, s.epoch, s.crashes
