-- The live relays that have a schedule in their settings.
select array(select r.name from outbox.relay r
              where r.seen_at > clock_timestamp() - interval '30 seconds'
                and (r.schedules ? %(name)s or r.config ? format('schedules.%%s.cron', %(name)s::text))
              order by r.name limit 20) as relays
