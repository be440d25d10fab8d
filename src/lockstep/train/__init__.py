"""`Run` and its training loop: `run` has the methods that a program calls, `loop` the loop, `loop_state` its state."""
