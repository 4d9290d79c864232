"""The metrics of a relay process, as ``/metrics`` exports them."""
