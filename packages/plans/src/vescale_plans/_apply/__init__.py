"""A plan applied to a model: boundaries of modules, inputs, what must agree between ranks."""
