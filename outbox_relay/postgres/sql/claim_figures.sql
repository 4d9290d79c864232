-- Claims the measuring of figures; no token if another relay has it. With the database's time.
select c.token, c.now from outbox_internal.claim_figures(%(relay)s::uuid, %(seconds)s::double precision) c
