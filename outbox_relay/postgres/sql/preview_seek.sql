-- The events that a seek would deliver again or pass over.
select again, passed_over, dead, discarded, exact
  from outbox.preview_seek(%(sink)s, %(to)s, %(most)s::integer, %(seconds)s::double precision)
