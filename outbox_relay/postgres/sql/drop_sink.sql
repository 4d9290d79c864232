-- Remove a sink, or some of its rows if it has many, or forget the name of a removed one.
select removed, forgotten, deliveries, audit
  from outbox.drop_sink(%(sink)s, %(forget)s::boolean, %(most)s::integer, %(actor)s, %(reason)s, %(audit)s::bigint)
