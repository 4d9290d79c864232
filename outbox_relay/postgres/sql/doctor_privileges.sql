-- Privileges that `migrate` granted to roles and that they lack now: a line for each role and kind.
select format('role "%%s" (%%s) lacks %%s of its privileges, such as %%s', m.role_name, m.kind, count(*),
              min(format('%%s on %%s %%s', m.privilege, m.object_type, m.name))) as said
  from outbox.missing_privilege m
 group by m.role_name, m.kind
 order by m.role_name, m.kind
