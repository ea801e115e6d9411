"""Functions that rename, join, part or pick elements."""
