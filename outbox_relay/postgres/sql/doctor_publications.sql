-- Publications that publish partitions of the schema's tables as tables of their own: a subscriber needs each of
-- tomorrow's. `missing` are the partitioned tables that such a publication does not name itself.
with recursive parts as (
  select c.oid as root, c.oid as part
    from pg_catalog.pg_class c
   where c.relnamespace = 'outbox'::regnamespace and c.relkind = 'p' and not c.relispartition
  union all
  select p.root, i.inhrelid from parts p join pg_catalog.pg_inherits i on i.inhparent = p.part
), published as (
  select t.pubname, p.root, format('%%I.%%I', t.schemaname, t.tablename) as name
    from pg_catalog.pg_publication_tables t
    join pg_catalog.pg_class c on c.relname = t.tablename and c.relnamespace = 'outbox'::regnamespace
    join parts p on p.part = c.oid and p.part <> p.root
   where t.schemaname = 'outbox'
)
select b.pubname::text as name, quote_ident(b.pubname) as quoted, b.puballtables as all_tables, min(f.name) as example,
       array(select distinct format('outbox.%%I', c.relname)
               from published m join pg_catalog.pg_class c on c.oid = m.root
              where m.pubname = b.pubname and not b.puballtables
                and not exists (select from pg_catalog.pg_publication_namespace n
                                 where n.pnpubid = b.oid and n.pnnspid = c.relnamespace)
                and not exists (select from pg_catalog.pg_publication_rel r
                                 where r.prpubid = b.oid and r.prrelid = c.oid)
              order by 1) as missing
  from published f join pg_catalog.pg_publication b on b.pubname = f.pubname
 group by b.oid, b.pubname, b.puballtables
 order by b.pubname
 limit 10
