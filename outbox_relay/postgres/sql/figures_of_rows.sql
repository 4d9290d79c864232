-- The rows of one sink by state.
select r.state, r.rows, r.oldest from outbox.figures_of_rows(%(sink)s::text, %(most)s::integer) r
