"""The demo: a shop, two relays and two destinations on this machine, one relay killed, and the account at the end.

`story` runs it. Shop, receiver and consumer are processes of their own, started as
`python -m outbox_relay.workbench.demo.…`.
"""
