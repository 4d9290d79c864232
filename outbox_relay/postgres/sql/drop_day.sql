-- Remove one empty partition that is past keep_days.
select outbox_internal.drop_day(%(lease)s::bigint)::text
