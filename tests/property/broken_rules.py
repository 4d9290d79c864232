"""SQL that takes one rule of `why` out of a database."""

IGNORE_ROUTES = """
create or replace function outbox_internal.type_matches(patterns text[], event_type text) returns boolean
language sql stable
as $$
    select coalesce(bool_or(outbox_internal.types_of(k.name) is null
                            or event_type like any (outbox_internal.types_of(k.name))), false)
      from outbox.sink k
$$"""
"""Every row of the history has the patterns that are in force now."""
RECORD_NOT = """
create function outbox.record_not() returns trigger language plpgsql as 'begin return null; end';
create trigger record_not before insert on outbox.sink_route
    for each row when (new.kind = '{}') execute function outbox.record_not()"""
"""Changes of one kind are not recorded: a seek goes on from where its sink was, or other routes do not begin."""
IGNORE_OWNERS = """
create function outbox.own_not() returns trigger language plpgsql as 'begin new.upto_id := 0; return new; end';
create trigger own_not before insert on outbox.sink_route for each row execute function outbox.own_not()"""
"""No relay delivers on under the routes before."""

IGNORE_REPLAYS = """
create or replace function outbox_internal.replay_outcomes(wanted uuid)
returns table (sink text, replays jsonb, delivered boolean, settled boolean)
language sql stable
as 'select null::text, null::jsonb, null::boolean, null::boolean where false'"""
"""No replay settles an event."""
KEEP_NOT = """
create function outbox.keep_not() returns trigger language plpgsql as 'begin return null; end';
create trigger keep_not before insert on outbox.replay_exception
    for each row when (new.outcome = '{}') execute function outbox.keep_not()"""
"""Exceptions with one of the outcomes are not kept."""
COVER_ALL = """
create or replace function outbox_internal.replay_places(replay_id bigint)
returns table (shard smallint, last_id bigint)
language sql stable
as 'select n::smallint, 9223372036854775806::bigint from generate_series(0, 63) n'"""
"""Every event counts as passed by the position of a replay."""
