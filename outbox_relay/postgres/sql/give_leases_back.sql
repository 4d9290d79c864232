-- End the leases of rows whose claim was not answered. They were not tried, so the claim does not count.
with waiting as (
    update outbox.delivery d
       set lease = null, lease_until = null, owner = null, claims = greatest(d.claims - 1, 0)
     where d.sink = %(sink)s and d.state = 'waiting' and d.due_at <= now() and d.lease = any (%(leases)s::uuid[])
    returning d.id
),
held as (
    update outbox.delivery d
       set lease = null, lease_until = null, owner = null, claims = greatest(d.claims - 1, 0)
     where d.sink = %(sink)s and d.state = 'held' and d.lease = any (%(leases)s::uuid[])
    returning d.id
)
select (select count(*) from waiting) + (select count(*) from held)
