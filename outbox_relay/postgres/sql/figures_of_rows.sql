-- The rows of one sink by state.
select r.state, r.rows, r.oldest from outbox_internal.figures_of_rows(%(sink)s::text, %(most)s::integer) r
