-- The oldest unsettled event of a sink, of its rows and of the log behind its positions, without latecomers; and the oldest
-- of its first rows that has failed.
with rows as materialized (
    select d.id, d.uid, d.last_error
      from outbox.delivery d
     where d.sink = %(sink)s::text and d.state in ('waiting', 'held') and (d.deliver_at is null or d.deliver_at <= now())
     order by d.id
     limit 1000
)
select (select o.uid
          from (
            (select r.id, r.uid from rows r order by r.id limit 1)
            union all
            (select e.id, e.uid
               from outbox_internal.unsettled(%(sink)s::text) u
              cross join (select outbox_internal.types_of(%(sink)s::text) as types offset 0) t
              cross join lateral (
                select l.id, l.uid
                  from outbox.event l
                 where l.id > u.after_id and l.id <= u.upto_id and l.shard = any (u.shards)
                   and not pg_visible_in_snapshot(l.xid, u.a)
                   and l.deliver_at is null and (t.types is null or l.type like any (t.types))
                   and not exists (select from outbox.delivery d where d.sink = %(sink)s::text and d.id = l.id)
                 order by l.id
                 limit 1
              ) e
              where not u.late
              order by e.id
              limit 1)
          ) o
         order by o.id
         limit 1) as uid,
       f.uid as failing_uid, f.last_error as error
  from (values (1)) one
  left join lateral (select r.uid, r.last_error from rows r where r.last_error is not null order by r.id limit 1) f on true
