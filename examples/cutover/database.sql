-- The old queue, its outcome, and what the cut-over compares.
create table jobs (uid uuid primary key, customer text not null, total integer not null);
create table invoices (uid uuid primary key, customer text not null, total integer not null);
create table seen (uid uuid primary key);
create table rehearsed (uid uuid primary key, customer text not null, total integer not null);
