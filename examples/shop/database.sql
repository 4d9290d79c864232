-- Creates the shop's database when PostgreSQL starts on an empty volume. It has four roles, none of them a superuser:
-- shop_owner owns the tables and the schema outbox and runs `outbox-relay migrate`; shop_app is the application's role,
-- relay the relay's, and page that of the page.
\getenv owner_password SHOP_OWNER_PASSWORD
\getenv app_password SHOP_APP_PASSWORD
\getenv relay_password RELAY_PASSWORD
\getenv page_password PAGE_PASSWORD

create role shop_owner login password :'owner_password';
create role shop_app login password :'app_password';
create role relay login password :'relay_password';
create role page login password :'page_password';

select current_database() as shop \gset
alter database :"shop" owner to shop_owner;
-- Limits for the sessions of a relay that is cut off. `migrate` sets them itself if its role may.
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
