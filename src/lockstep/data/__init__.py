"""From samples to batches: `sample_order` says which sample is where, `batches` loads them, `ledger` proves it."""
