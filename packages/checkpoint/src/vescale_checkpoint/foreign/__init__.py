"""What checkpoints of others need: the pickles of torch's, read as data."""
