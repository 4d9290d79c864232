-- How many events of a sink stand as rows that are to be delivered, counted up to `most`.
select count(*)
  from (select from outbox.delivery d where d.sink = %(sink)s and d.state <> 'dead' limit %(most)s::integer) r
