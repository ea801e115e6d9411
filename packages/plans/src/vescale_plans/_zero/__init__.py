"""Data parallelism and ZeRO 0 to 3: flat buckets, their reductions, and optimizers over shards."""
