-- Make rows of the next events of a window, and move the positions of their shards with them.
select mine, upto, passed, parked, dead, due_in
  from outbox_internal.park_window(
           %(sink)s::text, %(owner)s::uuid, %(shards)s::smallint[], %(epochs)s::bigint[], %(types)s::text[],
           %(a_seq)s::bigint, %(a_snapshot)s::pg_snapshot, %(a_next)s::bigint,
           %(b_seq)s::bigint, %(b_snapshot)s::pg_snapshot, %(b_next)s::bigint,
           %(late)s::boolean, %(after)s::bigint, %(upto)s::bigint, %(rows)s::integer, %(bytes)s::bigint,
           %(end_a_seq)s::bigint, %(end_a_snapshot)s::pg_snapshot, %(end_a_next)s::bigint,
           %(end_b_seq)s::bigint, %(end_b_snapshot)s::pg_snapshot, %(end_b_next)s::bigint, %(end_last)s::bigint,
           %(fair)s::boolean, %(reason)s::text, %(server)s::text)
