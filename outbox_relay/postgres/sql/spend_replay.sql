-- Pay for events of a replay that were read, and return how many may be read now.
select outbox_internal.spend_replay(%(replay)s::bigint, %(spent)s::integer)
