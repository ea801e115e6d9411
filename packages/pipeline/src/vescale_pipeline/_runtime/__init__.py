"""A pipeline at work: stages, their forwards and backwards, and the interpreter of a schedule's actions."""
