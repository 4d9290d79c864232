-- Makes the partitions (UTC) that are missing from today to `days_ahead` days ahead, and returns how many. Each has a
-- seventh of the days of retention, at least one and at most 31 (as it has where events are kept indefinitely): every attached
-- partition makes each read a little slower, and is locked by it. Those that exist stay as they are. They begin above the newest row of the DEFAULT partition, so that attaching finds nothing to move.
-- SECURITY DEFINER because only the owner of the log may attach: the relay's role is not that. Default privileges of
-- the owner give nothing away, and nothing that the caller has set decides where or how a table is made.
--
-- An event of a later time in the DEFAULT partition, such as one that was emitted while the clock was
-- wrong, keeps no partition of an earlier time from being made. While the DEFAULT partition is large, a call makes one
-- partition: PostgreSQL reads all of DEFAULT for each, and emits wait for the end of the transaction.
create or replace function outbox_internal.make_partitions(days_ahead integer default 3) returns integer
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set lock_timeout = '50ms'
set timezone = 'UTC'
set datestyle = 'ISO, YMD'
set default_tablespace = ''
set default_table_access_method = 'heap'
as $$
declare
    today timestamp := date_trunc('day', clock_timestamp() at time zone 'UTC');
    large constant bigint := 8388608;
    span constant integer := (
        select case when r.keep_days = 0 and r.stated then 31 else least(greatest(r.keep_days / 7, 1), 31) end
          from outbox.retention r);
    begins timestamp;
    upto timestamp;
    part text;
    role text;
    made integer := 0;
begin
    -- One session at a time. Others do not wait, and statements on the rows are not held up.
    begin
        lock table only outbox.event in share update exclusive mode nowait;
    exception when lock_not_available then
        return 0;
    end;
    for begins in select today + n * interval '1 day' from generate_series(0, least(greatest(days_ahead, 1), 30)) n loop
        part := 'event_' || to_char(begins, 'YYYYMMDD');
        continue when to_regclass('outbox.' || part) is not null;
        continue when exists (select from outbox_internal.partitions() p
                               where p.day <> '-infinity' and p.day <= begins and p.upto > begins at time zone 'UTC');
        upto := least(begins + span * interval '1 day',
                      (select min(p.day)::timestamp from outbox_internal.partitions() p where p.day > begins),
                      (select date_trunc('day', d.created_at at time zone 'UTC')
                         from outbox.event_default d
                        where d.created_at >= begins at time zone 'UTC'
                        order by d.created_at limit 1));
        continue when upto <= begins;
        execute format('create table outbox.%I (like outbox.event including defaults including generated)', part);
        perform outbox_internal.keep_no_statistics(to_regclass('outbox.' || part), '{key, payload, headers}');
        for role in
            select distinct case when a.grantee = 0 then 'public' else quote_ident(pg_get_userbyid(a.grantee)) end
              from pg_class c cross join lateral aclexplode(c.relacl) a
             where c.oid = ('outbox.' || part)::regclass and a.grantee <> c.relowner
        loop
            execute format('revoke all on table outbox.%I from %s cascade', part, role);
        end loop;
        execute format('alter table outbox.event attach partition outbox.%I for values from (%L) to (%L)',
                       part, begins at time zone 'UTC', upto at time zone 'UTC');
        made := made + 1;
        exit when pg_relation_size('outbox.event_default') > large;
    end loop;
    return made;
end
$$;

-- The partitions of the log, with the day at which each begins and the time at which it ends. Those that do not begin at
-- midnight (UTC) are left out: they were made by hand.
create or replace function outbox_internal.partitions() returns table (part regclass, day date, upto timestamptz)
language sql stable
set search_path = pg_catalog, pg_temp
set timezone = 'UTC'
set datestyle = 'ISO, YMD'
as $$
    select p.part, p.first::date, p.upto
      from (
        select c.oid::regclass as part,
               case when b.bound = 'DEFAULT' then '-infinity' else split_part(b.bound, '''', 2)::timestamptz end as first,
               case when b.bound = 'DEFAULT' then 'infinity' else split_part(b.bound, '''', 4)::timestamptz end as upto
          from pg_inherits i
          join pg_class c on c.oid = i.inhrelid
         cross join lateral (select pg_get_expr(c.relpartbound, c.oid) as bound) b
         where i.inhparent = 'outbox.event'::regclass
           and (b.bound = 'DEFAULT' or b.bound like 'FOR VALUES FROM (''%'') TO (''%'')')
      ) p
     where p.first = p.first::date::timestamptz
$$;

