-- Record the circuit and the last error of a sink, for people. A destination that has been down for `pause_after`
-- seconds (0: never) is paused until a person resumes the sink: then this returns the reason, else null.
update outbox.sink k
   set circuit = %(circuit)s,
       circuit_since = n.since,
       in_flight_limit = %(in_flight_limit)s::integer,
       last_error = coalesce(%(error)s::text, k.last_error),
       last_error_at = case when %(error)s::text is null then k.last_error_at else n.now end,
       paused = k.paused or n.too_long,
       paused_reason = case when n.too_long and not k.paused
                            then format('the destination was down for %%s seconds: %%s', %(pause_after)s::bigint, %(error)s::text)
                            else k.paused_reason end
  from (
    select b.name, b.paused, t.now, b.since, coalesce(%(pause_after)s::bigint > 0
               and b.since < t.now - %(pause_after)s::bigint * interval '1 second', false) as too_long
      from (select clock_timestamp() as now) t,
           lateral (select s.name, s.paused, case when %(circuit)s <> 'closed' then coalesce(s.circuit_since, t.now) end as since
                      from outbox.sink s where s.name = %(sink)s) b
  ) n
 where k.name = n.name
   and (k.circuit <> %(circuit)s or %(error)s::text is not null
        or k.in_flight_limit is distinct from %(in_flight_limit)s::integer)
returning case when n.too_long and not n.paused then k.paused_reason end as paused_reason
