-- Claim the measuring of figures; no token if another relay has it. With the database's time. A lease that ends later than
-- any claim allows comes from a clock that was set back.
with claimed as (
    insert into outbox.figures as f (owner, token, lease_until)
    values (%(relay)s::uuid, gen_random_uuid(),
            clock_timestamp() + least(greatest(%(seconds)s::double precision, 1), 60) * interval '1 second')
        on conflict (single) do update
       set owner = excluded.owner, token = excluded.token, lease_until = excluded.lease_until
     where f.owner is not distinct from excluded.owner or f.lease_until <= clock_timestamp()
           or f.lease_until > clock_timestamp() + interval '1 minute'
    returning f.token
)
select (select c.token from claimed c) as token, extract(epoch from clock_timestamp())::double precision as now
