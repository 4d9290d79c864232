-- The secret of the hashes of keys in links of the page.
select key from outbox.page_key
