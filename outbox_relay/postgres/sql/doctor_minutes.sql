-- The age of the newest minute of the history, null if there is none, and the time since the first of the live relays started.
select extract(epoch from clock_timestamp() - (select max(h.at) from outbox.history h))::double precision as newest,
       extract(epoch from clock_timestamp() - (
           select min(r.started_at) from outbox.relay r
            where r.seen_at > clock_timestamp() - %(seconds)s::double precision * interval '1 second'
       ))::double precision as uptime
