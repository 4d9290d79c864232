-- Delete outranked rows among the `most` oldest rows of each sink in the ledger, and return their number.
select outbox_internal.trim_progress(%(most)s::integer) as removed
