-- Stores figures under a token; false if it has lapsed.
select outbox.store_figures(%(relay)s::uuid, %(token)s::uuid, %(figures)s::jsonb)
