"""The numbers that torch draws on CUDA, at the cost of a shard."""
