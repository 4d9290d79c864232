-- Mark an event as handled by a consumer. True: this is the first time, and the caller's effect belongs into this
-- transaction. False: it was handled before. While another transaction has the mark, the call waits for its end: it returns
-- false after a commit, and true after a rollback. In a WHERE clause it would be called for each row, and again for a row
-- that another transaction has changed meanwhile.
create or replace function outbox.once(consumer text, uid uuid) returns boolean
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
begin
    if consumer is null or uid is null then
        raise exception using errcode = 'invalid_parameter_value',
            message = format('outbox.once: %s must not be null', case when uid is null then 'uid' else 'consumer' end);
    end if;
    if octet_length(consumer) not between 1 and 255 then
        raise exception using errcode = 'invalid_parameter_value',
            message = format('outbox.once: consumer must have 1 to 255 bytes, not %s', octet_length(consumer));
    end if;
    insert into outbox.inbox (consumer, uid) values (once.consumer, once.uid) on conflict do nothing;
    return found;
end
$$;
comment on function outbox.once is
    'Mark an event as handled by a consumer, in the transaction of its effect. True: it is the first time. False: it was '
    'handled before. Waits while another transaction has the mark.';

-- Look at the next `most` marks that are older than keep_uids_days, in the order of their times, and remove those whose
-- event cannot come again: it is neither in the log nor in a row of outbox.delivery. `removed` counts; `left_over` says that
-- the lap is not over. Marks that are kept are looked at once in a lap.
create or replace function outbox_internal.trim_inbox(lease bigint, most integer, out removed integer, out left_over boolean)
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_custom_plan
set enable_seqscan = off
set jit = off
as $$
declare
    t outbox.retention;
    cutoff timestamptz;
    last_at timestamptz;
    looked integer;
begin
    perform outbox_internal.renew_retention(lease);
    most := least(greatest(coalesce(most, 1000), 1), 1000);
    select * into t from outbox.retention;
    removed := 0;
    left_over := false;
    if t.keep_uids_days = 0 or t.hold_until > clock_timestamp()
       or (t.inbox_cursor is null and t.inbox_lap_at > clock_timestamp() - interval '1 hour'
           and t.inbox_lap_at <= clock_timestamp()) then
        return;
    end if;
    cutoff := clock_timestamp() - make_interval(days => t.keep_uids_days);
    select count(*), max(n.handled_at) into looked, last_at
      from (select i.handled_at from outbox.inbox i
             where i.handled_at < cutoff and (t.inbox_cursor is null or i.handled_at > t.inbox_cursor)
             order by i.handled_at limit most) n;
    delete from outbox.inbox i
     where i.handled_at <= last_at and (t.inbox_cursor is null or i.handled_at > t.inbox_cursor)
       and outbox_internal.event_id(i.uid) is null
       and not exists (select from outbox.delivery d where d.uid = i.uid);
    get diagnostics removed = row_count;
    left_over := looked = most;
    update outbox.retention r
       set inbox_cursor = case when left_over then last_at end,
           inbox_lap_at = case when left_over then r.inbox_lap_at else clock_timestamp() end;
end
$$;

