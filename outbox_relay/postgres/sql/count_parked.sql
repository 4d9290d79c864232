-- The number of rows of a sink that are to be delivered, and whether one of them waits for a part of the destination.
select standing, waiting from outbox_internal.rows_standing(%(sink)s::text, %(most)s::integer, %(trouble)s::boolean)
