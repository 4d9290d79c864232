-- Begin a pass of the retention. `lease` is null while another process does it.
select * from outbox_internal.begin_retention(
    %(owner)s::uuid, %(actor)s::text, %(seconds)s::double precision, %(at_once)s::boolean, %(works)s::boolean,
    %(reason)s::text
)
