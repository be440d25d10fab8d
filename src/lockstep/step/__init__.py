"""One training step of `Run`, from the batch to the new weights: begin with `step`.

`shard_gradients` sums gradients, `shard_graphs` runs shards as CUDA graphs, `buffer_exchange` keeps buffers independent
of the number of workers, `step_check` decides whether a step is applied.
"""
