"""The `philox` stream: words that are a function of a key and of a place."""
