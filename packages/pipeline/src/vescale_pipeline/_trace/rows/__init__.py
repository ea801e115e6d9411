"""Relates the values of a forward to the rows of its batch."""
