"""How the values of a forward come from the rows of its batch."""
