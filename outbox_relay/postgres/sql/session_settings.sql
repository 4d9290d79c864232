-- The settings of this session, as SHOW prints them; null means that this server has no such setting. For a role that no
-- policy concerns, row_security is as good as off.
select n.name,
       case when n.name = 'row_security' and r.exempt then 'off' else pg_catalog.current_setting(n.name, true) end
  from pg_catalog.unnest(%(names)s::text[]) n (name)
 cross join (select rolsuper or rolbypassrls from pg_catalog.pg_roles where rolname = current_user) r (exempt)
