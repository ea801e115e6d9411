"""Whether a module's own code does the same on plain local tensors: found by trying."""
