-- Register the schedules of a relay's file.
select name, generation from outbox.register_schedules(%(wanted)s::jsonb)
