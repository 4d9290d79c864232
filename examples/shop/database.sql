-- The shop's database, made once, when PostgreSQL starts on an empty volume. Three roles, none of them a superuser:
-- shop_owner owns the tables and the schema outbox (it runs `outbox-relay migrate`), shop_app trades, relay relays.
\getenv owner_password SHOP_OWNER_PASSWORD
\getenv app_password SHOP_APP_PASSWORD
\getenv relay_password RELAY_PASSWORD

create role shop_owner login password :'owner_password';
create role shop_app login password :'app_password';
create role relay login password :'relay_password';

select current_database() as shop \gset
alter database :"shop" owner to shop_owner;
-- Bounds for a relay that vanishes, which `migrate` sets by itself where its role may.
alter role relay in database :"shop" set idle_in_transaction_session_timeout = '10s';
alter role relay in database :"shop" set statement_timeout = '30s';
alter role relay in database :"shop" set lock_timeout = '5s';

set role shop_owner;
create table orders (
    id bigint generated always as identity primary key,
    total numeric(12, 2) not null,
    placed_at timestamptz not null default now(),
    paid_at timestamptz
);
create index on orders (id) where paid_at is null;
grant select, insert, update on orders to shop_app;
