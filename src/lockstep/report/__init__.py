"""Reads the trace of a run: `lockstep report` and `lockstep watch`."""
