"""Unmodified architectures of transformers under plans: which are right, and what their steps send.

    shrink      how a configuration of any type is made small: by the names of its fields alone
    others      thirty that are no causal language model, with their inputs
    register    the types and classes (types.json), how each is built and what it is given
    outcome     one architecture under one case, against one device

`python -m architectures list` writes types.json: every causal-LM type of transformers whose small configuration
builds and trains on one device, and why others do not. That list is the denominator, whatever plans make of it.
`python -m architectures run` runs all under all cases and writes docs/architectures.md.
"""
