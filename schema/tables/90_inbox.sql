-- A mark for each event that a consumer has handled, written in the transaction that has the effect. The primary key lets
-- one transaction at a time have it, so an event has one effect, whenever and however often it comes.
--
-- The table is not partitioned. Partitions by the time of the handling could not be unique over all days, so an event that
-- comes again after midnight would have its effect again. Partitions by the time in a uid of version 7 would drop marks
-- too early: a replay, or a dead letter that is retried, writes its mark into a day that is due to be dropped. A caller
-- chooses any time for a uid, uids of other versions have none, and to drop a partition waits for every open consumer and
-- holds up all others. Old marks are deleted in small steps instead.
create table outbox.inbox (
    consumer text collate "C" not null,
    uid uuid not null,
    handled_at timestamptz not null default clock_timestamp(),
    primary key (consumer, uid)
);
comment on table outbox.inbox is
    'The events that each consumer has handled. Call outbox.once to add one.';
create index inbox_handled_at on outbox.inbox (handled_at);

