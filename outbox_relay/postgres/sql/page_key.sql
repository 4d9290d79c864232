-- The secret of the hashes of keys in links of the page.
select page_key from outbox.secret
