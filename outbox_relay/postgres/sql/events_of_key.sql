-- The newest events of a key among the ids in (after, upto], newest first.
select e.uid
  from outbox.event e
 where e.id > %(after)s::bigint and e.id <= %(upto)s::bigint
   and e.shard = (hashtextextended(%(key)s::text collate "C", 0) & 63)::smallint
   and e.key = %(key)s::text collate "C"
 order by e.id desc, e.uid
 limit %(most)s::integer
