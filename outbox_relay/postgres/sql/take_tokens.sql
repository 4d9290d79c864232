-- Take tokens of a sink's rate, and give back those that were not used.
select taken, remaining from outbox_internal.take_tokens(%(sink)s::text, %(wanted)s::integer, %(unused)s::integer)
