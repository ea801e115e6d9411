"""What `vescale.record` writes of tensors, and at which places two such records differ."""
