-- Write the first time of a schedule after its after_at, which only a relay can find. No row: this is out of date.
update outbox.schedule
   set next_at = %(next)s::timestamptz, error = null, error_at = null
 where name = %(name)s and generation = %(generation)s::bigint and next_at is null and after_at = %(seen)s::timestamptz
