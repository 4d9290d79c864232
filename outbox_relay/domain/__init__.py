"""Pure values and rules: no clock, no random numbers, no await, no I/O."""
