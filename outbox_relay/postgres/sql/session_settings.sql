-- The settings of this session, as SHOW prints them; null means that this server has no such setting.
select n.name, pg_catalog.current_setting(n.name, true) from pg_catalog.unnest(%(names)s::text[]) n (name)
