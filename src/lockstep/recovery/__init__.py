"""Calls that survive a lost worker, and states that survive the end of a process.

All collective calls of a `Run` go through `collective_calls`, or in an elastic run through `elastic_calls`, which joins
the next generation after a loss and makes the call again. `checkpointing` and `state_transfer` save and send the state.
"""
