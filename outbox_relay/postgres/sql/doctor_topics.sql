-- The topics whose events wait as rows while others of their sink are delivered. No attempt of such a row was counted. At
-- most 10,000 rows of a sink are looked at.
select k.name as sink, r.last_error as error, count(*)::integer as waiting
  from outbox.sink k
 cross join lateral (
    select d.attempts, d.last_error from outbox.delivery d
     where d.sink = k.name and d.state = 'waiting' and d.due_at < now() + interval '5 minutes'
     order by d.due_at, d.id limit 10000
 ) r
 where k.circuit = 'closed' and not k.paused and r.attempts = 0 and r.last_error like 'topic %%'
 group by k.name, r.last_error
 order by k.name, 3 desc, r.last_error
 limit 100
