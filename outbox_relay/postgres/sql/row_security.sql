-- Tables of the schema whose rows a policy may hide, and whether it does so from this role.
select quote_ident(c.relname) as name, row_security_active(c.oid) as hidden
  from pg_catalog.pg_class c
 where c.relnamespace = 'outbox'::regnamespace and c.relrowsecurity
 order by 1
