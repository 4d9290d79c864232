-- Put the limits of sinks in force on all relays, each for itself; return those that are refused, and why.
select l.sink, l.refused
  from (
    select w.sink, outbox_internal.state_limits(w.sink, w.limits) as refused
      from jsonb_each(%(limits)s::jsonb) w (sink, limits)
     where outbox_internal.only_at(%(server)s::text)
  ) l
 where l.refused is not null
