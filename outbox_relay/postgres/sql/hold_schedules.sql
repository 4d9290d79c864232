-- Record which generations of schedules this relay knows, and return those that have another one.
select name, generation, held from outbox_internal.hold_schedules(%(relay)s::uuid, %(known)s::jsonb)
