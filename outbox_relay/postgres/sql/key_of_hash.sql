-- The key of a row of `delivery` with this hash: the first 32 hexadecimal digits of its SHA-256.
select d.key from outbox.delivery d
 where d.key is not null and left(encode(sha256(convert_to(d.key, 'UTF8')), 'hex'), 32) = %(hash)s
 limit 1
