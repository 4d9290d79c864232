-- The settings that the live relays have recorded; null: not yet.
select name, version, config
  from outbox.relay
 where seen_at > clock_timestamp() - %(seconds)s::double precision * interval '1 second'
 order by name, id
