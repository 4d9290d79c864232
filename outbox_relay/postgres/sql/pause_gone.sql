-- The destination says that it will never be back: nothing more is sent to it until a person resumes the sink.
update outbox.sink
   set paused = true, paused_reason = %(reason)s::text
 where name = %(sink)s and not paused
