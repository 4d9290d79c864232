-- Let no shard be leased for longer than the longest lease: while the clock was ahead, it was leased until a time that is far
-- ahead. An owner that lives renews its leases before.
update outbox.shard set lease_until = clock_timestamp() + %(most)s::double precision * interval '1 second'
 where lease_until > clock_timestamp() + (%(most)s::double precision + 60) * interval '1 second'
