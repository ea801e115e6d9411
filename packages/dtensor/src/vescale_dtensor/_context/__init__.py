"""Attention over a sequence that is cut over a mesh axis: context parallelism.

`tiles` says which rows meet which columns, `kernels` attends a tile and takes its gradient, `ring` and `heads` are the
two ways in which keys and values come to queries, `transfer` moves blocks between ranks, and `choice` says which way
is taken. `products/attention.py` asks; all here works on plain local tensors.

Sources: Ring Attention (Liu et al., arXiv 2310.01889), Ulysses (Jacobs et al., arXiv 2309.14509), keys and values
gathered (Llama 3, arXiv 2407.21783).
"""
