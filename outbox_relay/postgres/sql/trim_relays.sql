-- Delete the heartbeats of relays that were last seen more than an hour ago; return their number.
with gone as (
    delete from outbox.relay where seen_at < clock_timestamp() - interval '1 hour' returning 1
)
select count(*) from gone
