"""What ranks tell each other through the store, and how each knows that the others live."""
