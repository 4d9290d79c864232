create or replace trigger sink_changed after insert or truncate or update of patterns, generation on outbox.sink
for each statement execute function outbox_internal.sink_changed();

create or replace trigger sink_deleted after delete on outbox.sink
referencing old table as removed
for each statement execute function outbox_internal.sink_deleted();

create or replace trigger keep_positions after delete on outbox.progress
    referencing old table as gone for each statement execute function outbox_internal.keep_positions();

create or replace trigger row_changed before update of state on outbox.delivery
for each row when ((old.state = 'dead') <> (new.state = 'dead')) execute function outbox_internal.row_changed();

create or replace trigger sink_paused after update of paused on outbox.sink
for each row when (old.paused <> new.paused) execute function outbox_internal.sink_paused();

-- Only dead rows call the function. A dead letter that a replay gives to its target died before.
create or replace trigger notify_dead after insert or update of state on outbox.delivery
for each row when (new.state = 'dead') execute function outbox_internal.notify_dead();

alter table outbox.sink alter home set default outbox_internal.home();
-- The id is given out before: defaults are evaluated in column order.
alter table outbox.event alter uid set default outbox_internal.uid_of(currval('outbox.event_id_seq'));
