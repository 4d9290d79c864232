-- How many events of a sink stand as rows to be delivered, counted up to `most` of those with a place in the order of a
-- key and of those without; scheduled ones that are not about to be due are left out, and are not looked through. And
-- whether one of them came back without an attempt being counted, as those do that wait for a part of the destination.
select (select count(*)
          from (select from outbox.delivery d
                 where d.sink = %(sink)s and d.ordered and d.state <> 'dead' limit %(most)s::integer) r)
     + (select count(*)
          from (select from outbox.delivery d
                 where d.sink = %(sink)s and not d.ordered and d.state = 'waiting'
                   and d.due_at < now() + interval '5 minutes' limit %(most)s::integer) r) as standing,
       exists (select from outbox.delivery d
                where d.sink = %(sink)s and d.state = 'waiting' and d.attempts = 0 and d.last_error is not null
                  and d.due_at < now() + interval '5 minutes') as waiting
