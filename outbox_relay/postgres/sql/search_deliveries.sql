-- Deliveries in one state that a filter means, newest event first, of those before (before_id, before_sink). If dead ones
-- are meant, at most `looks` rows of each sink are looked at, and otherwise that many of all. The search came to (floor,
-- floor_sink), where it can go on; `floor` is 0 if all rows were looked at. `matched` is the number of rows found, and up to
-- `most` of them are returned: always at least one row.
with sinks as materialized (
    select k.name from outbox.sink k
     where k.name < '~' collate "C" and (%(sink)s::text is null or k.name = %(sink)s::text)
),
bounds as materialized (
    select case when %(since)s::text is not null then outbox_internal.past_time('since', to_jsonb(%(since)s::text), c.at) end as since,
           case when %(until)s::text is not null then outbox_internal.past_time('until', to_jsonb(%(until)s::text), c.at) end as until,
           c.as_of
      from (select n.as_of, coalesce(n.as_of, now()) as at
              from (select case when %(as_of)s::text is not null
                                then outbox_internal.past_time('as_of', to_jsonb(%(as_of)s::text), now()) end as as_of) n) c
),
looked as materialized (
    select l.id, l.sink, l.place = %(looks)s::integer as is_last, l.meant
      from sinks k
     cross join bounds b
     cross join lateral (
        select d.id, d.sink, row_number() over (order by d.id desc) as place,
               (%(type)s::text is null or d.type like %(type)s::text) and (%(key)s::text is null or d.key = %(key)s::text)
               and (%(status)s::integer is null or d.last_status = %(status)s::integer)
               and (b.since is null or d.created_at >= b.since) and (b.until is null or d.created_at < b.until)
               and (b.as_of is null or outbox_internal.was_counted(d.state, d.ordered, d.deliver_at, d.since, d.last_attempt_at, b.as_of,
                                                          %(by_error)s::boolean, %(state)s::text = 'scheduled'))
               and (%(error)s::text is null
                    or case when octet_length(%(error)s::text) = length(%(error)s::text)
                            then strpos(lower(d.last_error collate "C"), lower(%(error)s::text collate "C"))
                            else strpos(lower(d.last_error), lower(%(error)s::text)) end > 0)
               and (%(kind)s::text is null
                    or (d.last_status is null
                        and starts_with(coalesce(d.last_error, ''), substring(%(kind)s::text from '^[^N…]*'))
                        and outbox_internal.error_kind(d.last_error) = %(kind)s::text))
               and (%(tenant)s::text is null
                    or (select e.tenant from outbox.event e
                         where e.id = d.id and e.shard = d.shard and e.created_at = d.created_at limit 1)
                       = %(tenant)s::text collate "C") as meant
          from outbox.delivery d
         where %(state)s::text = 'dead' and d.state = 'dead' and d.sink = k.name
           and d.id <= %(before_id)s::bigint and (d.id < %(before_id)s::bigint or d.sink < %(before_sink)s::text)
         order by d.id desc
         limit %(looks)s::integer
     ) l
    union all
    select l.id, l.sink, l.place = %(looks)s::integer,
           l.meant and exists (select from sinks k where k.name = l.sink)
      from bounds b
     cross join lateral (
        select d.id, d.sink, row_number() over (order by d.id desc, d.sink desc) as place,
               outbox_internal.delivery_state(d.state, d.ordered, d.deliver_at) = %(state)s::text
               and (%(type)s::text is null or d.type like %(type)s::text) and (%(key)s::text is null or d.key = %(key)s::text)
               and (%(status)s::integer is null or d.last_status = %(status)s::integer)
               and (b.since is null or d.created_at >= b.since) and (b.until is null or d.created_at < b.until)
               and (b.as_of is null or outbox_internal.was_counted(d.state, d.ordered, d.deliver_at, d.since, d.last_attempt_at, b.as_of,
                                                          %(by_error)s::boolean, %(state)s::text = 'scheduled'))
               and (%(error)s::text is null
                    or case when octet_length(%(error)s::text) = length(%(error)s::text)
                            then strpos(lower(d.last_error collate "C"), lower(%(error)s::text collate "C"))
                            else strpos(lower(d.last_error), lower(%(error)s::text)) end > 0)
               and (%(kind)s::text is null
                    or (d.last_status is null
                        and starts_with(coalesce(d.last_error, ''), substring(%(kind)s::text from '^[^N…]*'))
                        and outbox_internal.error_kind(d.last_error) = %(kind)s::text))
               and (%(tenant)s::text is null
                    or (select e.tenant from outbox.event e
                         where e.id = d.id and e.shard = d.shard and e.created_at = d.created_at limit 1)
                       = %(tenant)s::text collate "C") as meant
          from outbox.delivery d
         where %(state)s::text <> 'dead'
           and d.id <= %(before_id)s::bigint and (d.id < %(before_id)s::bigint or d.sink < %(before_sink)s::text)
         order by d.id desc, d.sink desc
         limit %(looks)s::integer
     ) l
),
reached as materialized (
    select coalesce(max(l.id) filter (where l.is_last), 0)::bigint as floor,
           case when %(state)s::text <> 'dead' then max(l.sink) filter (where l.is_last) end as floor_sink
      from looked l
),
found as materialized (
    select l.id, l.sink from looked l, reached r where l.meant and l.id >= r.floor
),
listed as materialized (
    select f.id, f.sink from found f order by f.id desc, f.sink desc limit %(most)s::integer
)
select now() as at, r.floor, coalesce(r.floor_sink, '')::text as floor_sink, (select count(*) from found)::bigint as matched, d.id, d.uid, d.sink::text as sink, d.type::text as type,
       d.key::text as key, outbox_internal.delivery_state(d.state, d.ordered, d.deliver_at) as state, d.attempts,
       d.last_error as error, d.last_status as status,
       outbox_internal.loadable_time(case when d.state = 'dead' then greatest(d.last_attempt_at, d.since) else d.since end) as since,
       case when d.state <> 'dead' then outbox_internal.loadable_time(d.due_at) end as due_at
  from reached r
  left join (listed l join outbox.delivery d on d.id = l.id and d.sink = l.sink) on true
 order by d.id desc, d.sink desc
