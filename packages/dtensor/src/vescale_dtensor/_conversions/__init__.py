"""Converts from one layout to another: the steps, their cost, and the gradient's way back."""
