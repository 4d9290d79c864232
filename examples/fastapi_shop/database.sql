-- The tables of the example. Run `outbox-relay migrate` first.
create table orders (
    id bigint generated always as identity primary key,
    total integer not null check (total > 0)
);
create table invoices (
    event uuid primary key,
    order_id bigint not null,
    total integer not null
);
