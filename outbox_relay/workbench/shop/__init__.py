"""The shop: an application with a known ledger of its events, and two destinations that record what arrives.

Shop, receiver and consumer are separate processes, started as
`python -m outbox_relay.workbench.shop.…`.
"""
