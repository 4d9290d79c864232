"""The demo: a shop, two relays and two destinations on this machine. One relay is killed.

`run` starts the processes and checks the deliveries. Shop, receiver and consumer are separate processes, started as
`python -m outbox_relay.workbench.demo.…`.
"""
