"""Data parallelism and ZeRO 0 to 3: flat buffers, their reductions, and optimizers over shards."""
