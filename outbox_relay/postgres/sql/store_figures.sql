-- Store figures under a token; false if it has lapsed.
with stored as (
    update outbox.figures f set at = clock_timestamp(), figures = %(figures)s::jsonb
     where f.owner = %(relay)s::uuid and f.token = %(token)s::uuid and f.lease_until > clock_timestamp()
    returning 1
)
select exists (select from stored)
