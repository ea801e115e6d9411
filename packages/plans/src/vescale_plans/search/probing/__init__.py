"""A model's structure found by influence: which features of one contraction reach which of the next."""
