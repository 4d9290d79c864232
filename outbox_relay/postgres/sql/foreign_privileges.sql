-- Privileges of roles in the schema, and default privileges on new objects of its owner, that `migrate` did not
-- grant: a line each.
select format('%%s has %%s on %%s %%s: outbox-relay migrate --revoke-others revokes it', coalesce('role "' || f.role_name || '"', 'PUBLIC'),
              f.privileges, f.object_type, string_agg(f.name, ', ' order by f.name)) as said
  from (
    select p.role_name, p.object_type, p.name,
           string_agg(distinct p.privilege || coalesce(' (' || p.column_name || ')', ''), ', ') as privileges
      from outbox.foreign_privilege p
     group by p.role_name, p.object_type, p.name
  ) f
 group by f.role_name, f.object_type, f.privileges
union all
select format('default privileges of role "%%s" give %%s %%s on each new %%s: outbox-relay takes that back from what it makes',
              d.owner_name, coalesce('role "' || d.role_name || '"', 'PUBLIC'),
              string_agg(d.privilege, ', ' order by d.privilege), d.object_type)
  from outbox.foreign_default_privilege d
 group by d.owner_name, d.role_name, d.object_type
 order by 1
