"""Static mode: modules that were shown to compute on shards what they compute on DTensors run on plain tensors."""
