-- Delete positions of names that are gone, at most `most` of them: a relay that did not know of the removal or the new name
-- of a sink wrote them later. A name with shards is not gone. They are looked for between the names of sinks, whose own
-- positions may have many dead versions. No name of a sink begins with `~`.
with known as (
    select n.name, lead(n.name, 1, '~') over (order by n.name) as next
      from (select '' collate "C" as name union all select k.name from outbox.sink k) n
), gone as materialized (
    select p.sink, p.seq
      from known n
     cross join lateral (
        select o.sink, o.seq
          from outbox.progress o
         where o.sink > n.name and o.sink < n.next
           and not exists (select from outbox.shard s where s.sink = o.sink)
         order by o.sink, o.seq
         limit %(most)s::integer
     ) p
     limit %(most)s::integer
), removed as (
    delete from outbox.progress p using gone g where p.sink = g.sink and p.seq = g.seq returning 1
)
select count(*) from removed
