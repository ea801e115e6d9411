"""What enters a call and what leaves it: microbatches, tensors that the forward writes to, outputs of the batch."""
