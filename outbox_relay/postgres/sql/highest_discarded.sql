-- The highest id that was discarded of the sink; null if there is none.
select (select m.id from outbox.discarded m where m.sink = %(sink)s order by m.id desc limit 1) as id
 where outbox_internal.only_at(%(server)s::text)
