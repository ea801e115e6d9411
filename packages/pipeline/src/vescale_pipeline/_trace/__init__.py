"""The dry run of a forward on placeholders, and what it tells of every stage."""
