-- Pauses or resumes a sink; relays look once a second. No row: there is no such sink.
-- A sink that is resumed is not paused again for the time that its destination was down before.
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
