"""Rank, device and process group of this worker: `init()`."""
