-- The types of the newest events of the log.
select distinct n.type
  from (select e.type from outbox.event e order by e.id desc limit %(most)s::integer) n
 order by n.type
