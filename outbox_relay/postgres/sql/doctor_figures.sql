-- The groups of figures of the database that the relays could not measure in their newest round. Other processes may have
-- stored anything, so only objects count, and a part of each name is returned.
select distinct left(e.entry ->> 'group', 40) as name
  from outbox.figures f
 cross join lateral jsonb_array_elements(
    case when jsonb_typeof(f.figures -> 'entries') = 'array' then f.figures -> 'entries' else '[]' end
 ) e (entry)
 where f.at > clock_timestamp() - %(seconds)s::double precision * interval '1 second'
   and jsonb_typeof(e.entry) = 'object' and e.entry ->> 'failed' = 'true' and e.entry ->> 'group' is not null
 order by 1
 limit 20
