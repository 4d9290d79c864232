-- The addresses of archives of a day whose objects can be removed.
select outbox_internal.unfinished_archives(%(day)s::date, %(lease)s::bigint)
