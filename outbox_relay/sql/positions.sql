-- Where these shards stand: of each the newest row of the ledger by epoch, then by number.
select s.shard, p.a_seq, p.a_snapshot::text, p.a_next, p.b_seq, p.b_snapshot::text, p.b_next, p.last_id
  from unnest(%(shards)s::smallint[]) s (shard)
 cross join lateral (
    select * from outbox.progress p
     where p.sink = %(sink)s and p.shard = s.shard
     order by p.epoch desc, p.seq desc
     limit 1
 ) p
 where outbox.only_at(%(server)s::text)
