-- Register the schedules of a relay's file.
select name, generation from outbox_internal.register_schedules(%(wanted)s::jsonb)
