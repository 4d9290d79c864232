-- Pause or resume a sink, which relays check once a second. No row means that there is no such sink.
-- For a resumed sink, the time that its destination was down before does not count towards the next pause.
with before as (
    select name, paused from outbox.sink where name = %(sink)s for update
),
changed as (
    update outbox.sink k
       set paused = %(paused)s::boolean, paused_reason = null,
           circuit_since = case when %(paused)s::boolean then k.circuit_since end
      from before b
     where k.name = b.name and b.paused <> %(paused)s::boolean
)
select b.paused from before b
