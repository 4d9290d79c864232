-- The newest recorded attempts of an event for each sink, oldest first.
select n.at, n.sink, n.number, n.relay, n.outcome, n.status, n.milliseconds, n.error, n.detail
  from (
    select r.*, row_number() over (partition by r.sink order by r.at desc, r.number desc) as place
      from (
        select a.at, a.sink, a.number, a.relay, a.outcome, a.status, a.milliseconds, a.error, a.detail
          from outbox.attempts_of(%(uid)s::uuid) a
      ) r
  ) n
 where n.place <= %(most)s::integer
 order by n.at, n.sink, n.number
