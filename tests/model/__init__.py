"""The model of claim, deliver, settle and hand-over in ``relay.pml``, checked by spin."""
