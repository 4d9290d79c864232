-- The rows of one sink by state, and the scheduled events that it takes.
select r.state, r.rows, r.oldest from outbox_internal.figures_of_rows(%(sink)s::text, %(most)s::integer) r
union all
select 'scheduled', count(*),
       coalesce(greatest(extract(epoch from clock_timestamp() - min(l.created_at)), 0), 0)::double precision
  from (select e.created_at from outbox.scheduled e
         where %(types)s::text[] is null or e.type like any (%(types)s::text[])
         limit %(most)s::integer) l
