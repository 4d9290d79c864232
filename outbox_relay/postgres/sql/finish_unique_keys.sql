-- Delete unique keys of events that are done; how many.
select outbox_internal.finish_unique_keys(%(most)s::integer)
