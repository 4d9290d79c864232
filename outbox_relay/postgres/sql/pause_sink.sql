-- Pause a sink whose destination is gone for good, until a person resumes it.
update outbox.sink
   set paused = true, paused_reason = %(reason)s::text
 where name = %(sink)s and not paused
