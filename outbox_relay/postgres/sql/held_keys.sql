-- The next keys with held rows, in their order: what a sweep looks at.
select key from outbox.held_keys(%(sink)s::text, %(after)s::text, %(most)s::integer)
