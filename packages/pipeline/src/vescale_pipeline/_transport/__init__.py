"""Traffic between the ranks of a pipeline: tensors, small words, signs of life and causes of failure."""
