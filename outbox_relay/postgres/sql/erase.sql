-- One step of an erasure, whose number is null for the first one.
select erasure_id, phase, place, upto_id, matched, done, left_over, undelivered, archives, key_hash, statistics
  from outbox.erase(%(subject)s::jsonb, %(actor)s::text, %(reason)s::text, %(dry_run)s::boolean, %(most_ids)s::integer,
                    %(erasure_id)s::bigint)
