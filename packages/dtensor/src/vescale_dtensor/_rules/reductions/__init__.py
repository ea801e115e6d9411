"""Functions that reduce or order along dims, normalisation and losses among them."""
