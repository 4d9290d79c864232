-- Remove one empty partition that is past keep_days.
select outbox.drop_day(%(lease)s::bigint)::text
