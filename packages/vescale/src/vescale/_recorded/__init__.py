"""Digests of tensors that `vescale.record` writes, and the places at which two such records differ."""
