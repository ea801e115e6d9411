"""Exchange between ranks through the store, and their signs of life."""
