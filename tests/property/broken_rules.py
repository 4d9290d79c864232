"""SQL that takes one rule of `why` out of a database."""

IGNORE_PASSES = """
create or replace function outbox_internal.type_matches(patterns text[], event_type text) returns boolean
language sql stable
as $$
    select coalesce(bool_or(outbox_internal.types_of(k.name) is null or event_type like any (outbox_internal.types_of(k.name))), false)
      from outbox.sink k
$$"""
"""Every pass has the patterns that are in force now."""
SEEK_ON = """
create or replace function outbox_internal.end_passes(sink_name text) returns void language sql volatile as ''"""
"""A pass goes on up to where a seek has put its sink."""
BEGIN_LATE = """
create or replace function outbox_internal.begin_claimed() returns trigger language plpgsql volatile
as 'begin return null; end'"""
"""No claim begins a pass, so newer generations read on under the older one's patterns."""

IGNORE_REPLAYS = """
create or replace function outbox_internal.event_states(wanted uuid) returns table (sink text, state text, details jsonb)
language sql stable
as 'select * from outbox_internal.passage_states(wanted)'"""
"""No replay settles an event."""
KEEP_NOT = """
create function outbox.keep_not() returns trigger language plpgsql as 'begin return null; end';
create trigger keep_not before insert on outbox.replay_exception
    for each row when (new.outcome = '{}') execute function outbox.keep_not()"""
"""Exceptions with one of the outcomes are not kept."""
COVER_ALL = """
create or replace function outbox_internal.replay_places(replay_id bigint) returns table (shard smallint, last_id bigint)
language sql stable
as 'select n::smallint, 9223372036854775806::bigint from generate_series(0, 63) n'"""
"""Every event counts as passed by the position of a replay."""
TRIM_EARLY = """
do $do$ begin
    execute replace(pg_get_functiondef('outbox_internal.trim_passes()'::regprocedure), 'and h.seq is null', '');
end $do$"""
"""Passes go by their ends, whatever their owners have written after them."""
