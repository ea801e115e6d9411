"""Pages that open without a network: one file each, nothing loaded from elsewhere."""
