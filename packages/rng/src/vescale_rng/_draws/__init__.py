"""torch's functions that draw, on sharded tensors."""
