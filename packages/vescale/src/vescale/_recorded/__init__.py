"""Records of runs, read again: digests of tensors, and where two records differ; spans of time, and who waited."""
