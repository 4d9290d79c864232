-- Pauses or resumes a sink; relays look once a second. No row: there is no such sink.
with before as (
    select name, paused from outbox.sink where name = %(sink)s for update
),
changed as (
    update outbox.sink k set paused = %(paused)s::boolean
      from before b
     where k.name = b.name and b.paused <> %(paused)s::boolean
)
select b.paused from before b
