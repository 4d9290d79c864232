"""The demo: a shop, two relays and two destinations on this machine. One relay is killed.

`run` starts the processes and checks the deliveries.
"""
