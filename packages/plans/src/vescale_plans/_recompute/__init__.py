"""Activations that are computed or gathered again in backward."""
