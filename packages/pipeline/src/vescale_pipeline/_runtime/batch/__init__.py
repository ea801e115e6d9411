"""Inputs and outputs of a call: microbatches, tensors that the forward writes to, outputs of the batch."""
