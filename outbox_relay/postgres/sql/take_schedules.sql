-- Give schedules the definitions of this relay's file, where it may, and return those that have them.
select name, generation from outbox_internal.take_schedules(%(wanted)s::jsonb)
