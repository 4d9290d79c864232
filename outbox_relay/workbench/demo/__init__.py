"""The demo: a shop, two relays and two destinations on this machine, a fault, and the judgement of what arrived.

`run` starts the parts, `faults` breaks one of them, `report` has the judgement.
"""
