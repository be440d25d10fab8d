"""The drop-in for DistributedDataParallel: `wrapper` is the class, `reducer` the state machine behind it."""
