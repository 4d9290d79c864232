"""The model of claim, deliver, settle and hand-over, checked by spin: see ``relay.pml``."""
