"""Functions of one element at a time, and those that make tensors."""
