-- The key of a row of `delivery` with this hash: the first 32 hexadecimal digits of its HMAC. `inner` and `outer` are the
-- padded secret of the two rounds.
select d.key from outbox.delivery d
 where d.key is not null
   and left(encode(sha256(%(outer)s::bytea || sha256(%(inner)s::bytea || convert_to(d.key, 'UTF8'))), 'hex'), 32) = %(hash)s
 limit 1
