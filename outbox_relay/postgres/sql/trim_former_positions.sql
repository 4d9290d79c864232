-- Delete positions of names that are gone, at most `most` of them: a relay that did not know of the removal or the new name
-- of a sink wrote them later. A name with shards is not gone. The names are found by the index, one look for each.
with recursive named as (
    (select p.sink from outbox.progress p order by p.sink limit 1)
    union all
    select (select p.sink from outbox.progress p where p.sink > n.sink order by p.sink limit 1)
      from named n
     where n.sink is not null
), gone as materialized (
    select p.sink, p.seq
      from named n
      join outbox.progress p on p.sink = n.sink
     where not exists (select from outbox.sink k where k.name = n.sink)
       and not exists (select from outbox.shard s where s.sink = n.sink)
     limit %(most)s::integer
)
delete from outbox.progress p using gone g where p.sink = g.sink and p.seq = g.seq
