"""What `testing` is made of: worlds of worker processes, the single-device oracle, random programs."""
