"""What a forward can read, found by looking through its code."""
