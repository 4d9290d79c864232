-- The next keys with held rows, in order, for the sweep.
select key from outbox_internal.held_keys(%(sink)s::text, %(after)s::text, %(most)s::integer)
