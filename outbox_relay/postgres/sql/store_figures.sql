-- Stores figures under a token; false if it has lapsed.
select outbox_internal.store_figures(%(relay)s::uuid, %(token)s::uuid, %(figures)s::jsonb)
