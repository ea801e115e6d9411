"""Models built without memory, and their values made where they lie."""
