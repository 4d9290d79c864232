-- The recorded attempts of an event, oldest first.
select a.at, a.sink, a.number, a.relay, a.outcome, a.status, a.milliseconds, a.error, a.detail
  from outbox.attempts_of(%(uid)s::uuid) a
 order by a.at, a.sink, a.number
