-- Count rows of a queue that are to be delivered, without those that wait for their part of spread_seconds: a page, by the
-- index of rows without an order.
select count(*) as rows, coalesce(max(r.id), %(after)s::bigint) as last
  from (
    select d.id from outbox.delivery d
     where d.sink = %(sink)s::text and d.id > %(after)s::bigint and not d.ordered and d.state <> 'dead'
       and (d.deliver_at is null or d.deliver_at <= d.since)
     order by d.id
     limit %(most)s::integer
  ) r
