-- Relays that were last seen an hour ago.
delete from outbox.relay where seen_at < clock_timestamp() - interval '1 hour'
