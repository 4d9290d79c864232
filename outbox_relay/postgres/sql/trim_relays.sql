-- Delete the heartbeats of relays that were last seen more than an hour ago, and the sessions that ended before that; return
-- the number of relays.
with ended as (
    delete from outbox.session where lease_until < clock_timestamp() - interval '1 hour'
),
gone as (
    delete from outbox.relay where seen_at < clock_timestamp() - interval '1 hour' returning 1
)
select count(*) from gone
