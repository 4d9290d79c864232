-- Remove minutes that are older than two days, at most this many; return their number.
with removed as (
    delete from outbox.history h
     using (select o.sink, o.at from outbox.history o where o.at < clock_timestamp() - interval '2 days'
             order by o.at limit %(most)s::integer for update skip locked) old
     where h.sink = old.sink and h.at = old.at
    returning 1
)
select count(*) from removed
