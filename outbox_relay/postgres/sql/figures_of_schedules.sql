-- The greatest lateness of a schedule, in seconds, and the number of schedules that failed. One without a next time is late
-- until a relay finds that.
select coalesce(max(greatest(extract(epoch from clock_timestamp() - coalesce(s.next_at, s.after_at)), 0)), 0)::double precision
           as late,
       count(s.error) as failing
  from outbox.schedule s
 where not s.paused
