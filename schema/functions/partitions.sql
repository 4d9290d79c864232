-- Makes the partitions (UTC) of the log, or of the attempts, that are missing from today to `days_ahead` days ahead, and
-- returns how many. Of the log, each has a seventh of the days of retention, at least one and at most 31 (as it has where
-- events are kept indefinitely): every attached partition makes each read a little slower, and is locked by it. Those that
-- exist stay as they are. They begin above the newest row of the DEFAULT partition, so that attaching finds nothing to move.
-- SECURITY DEFINER because only the owner of the log may attach: the relay's role is not that. Default privileges of the owner
-- give nothing away, and nothing that the caller has set decides where or how a table is made.
--
-- A row of a later time in the DEFAULT partition, such as one that was written while the clock was
-- wrong, keeps no partition of an earlier time from being made. While the DEFAULT partition is large, a call makes one
-- partition: PostgreSQL reads all of DEFAULT for each, and emits wait for the end of the transaction.
create or replace function outbox_internal.make_partitions(days_ahead integer default 3, parent text default 'event') returns integer
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set lock_timeout = '50ms'
set timezone = 'UTC'
set datestyle = 'ISO, YMD'
set default_tablespace = ''
set default_table_access_method = 'heap'
as $$
declare
    today constant timestamp := date_trunc('day', clock_timestamp() at time zone 'UTC');
    large constant bigint := 8388608;
    is_log constant boolean := parent = 'event';
    time_column constant text := case parent when 'event' then 'created_at' when 'attempt' then 'at' end;
    contents constant text[] := case when is_log then '{key, payload, headers}' else '{error, detail}' end;
    span constant integer := (
        select case when not is_log then 1 when r.keep_days = 0 and r.stated then 31 else least(greatest(r.keep_days / 7, 1), 31) end
          from outbox.retention r);
    root regclass;
    begins timestamp;
    upto timestamp;
    in_default timestamp;
    part text;
    role text;
    made integer := 0;
begin
    if time_column is null then
        raise exception using errcode = 'invalid_parameter_value', message = 'parent must be event or attempt';
    end if;
    root := 'outbox.' || parent;
    -- One session at a time. Others do not wait, and statements on the rows are not held up.
    begin
        execute format('lock table only %s in share update exclusive mode nowait', root);
    exception when lock_not_available then
        return 0;
    end;
    for begins in select today + n * interval '1 day' from generate_series(0, least(greatest(days_ahead, 1), 30)) n loop
        part := parent || to_char(begins, '_YYYYMMDD');
        continue when to_regclass('outbox.' || part) is not null;
        continue when exists (select from outbox_internal.partitions(root) p
                               where p.day <> '-infinity' and p.day <= begins and p.upto > begins at time zone 'UTC');
        execute format('select date_trunc(''day'', min(d.%1$I) at time zone ''UTC'') from outbox.%2$I d where d.%1$I >= $1',
                       time_column, parent || '_default')
           into in_default using begins at time zone 'UTC';
        upto := least(begins + span * interval '1 day', in_default,
                      (select min(p.day)::timestamp from outbox_internal.partitions(root) p where p.day > begins));
        continue when upto <= begins;
        execute format('create table outbox.%I (like %s including defaults)', part, root);
        perform outbox_internal.keep_no_statistics(to_regclass('outbox.' || part), contents);
        for role in
            select distinct case when a.grantee = 0 then 'public' else quote_ident(pg_get_userbyid(a.grantee)) end
              from pg_class c cross join lateral aclexplode(c.relacl) a
             where c.oid = to_regclass('outbox.' || part) and a.grantee <> c.relowner
        loop
            execute format('revoke all on table outbox.%I from %s cascade', part, role);
        end loop;
        execute format('alter table %s attach partition outbox.%I for values from (%L) to (%L)',
                       root, part, begins at time zone 'UTC', upto at time zone 'UTC');
        made := made + 1;
        exit when pg_relation_size(to_regclass('outbox.' || parent || '_default')) > large;
    end loop;
    return made;
end
$$;

-- The partitions of the log, or of the attempts, with the day at which each begins and the time at which it ends. Those that do
-- not begin at midnight (UTC) are left out: they were made by hand.
create or replace function outbox_internal.partitions(root regclass default 'outbox.event') returns table (
    part regclass, day date, upto timestamptz
)
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
         where i.inhparent = root
           and (b.bound = 'DEFAULT' or b.bound like 'FOR VALUES FROM (''%'') TO (''%'')')
      ) p
     where p.first = p.first::date::timestamptz
$$;
