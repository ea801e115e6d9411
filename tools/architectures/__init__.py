"""Unmodified architectures of transformers under plans: which are right, and what their steps send.

    shrink      how a configuration of any type is made small: by the names of its fields alone
    others      thirty that are no causal language model, with their inputs
    register    the types and classes (types.json), how each is built and what it is given
    outcome     one architecture under one case, against one device
    run         all cases of an architecture, with its plan and what its cut weights should send
    table       outcomes.json and docs/architectures.md

`python -m architectures list` writes types.json: every causal-LM type of transformers whose small configuration
builds and trains on one device, and why others do not. That list is the denominator, whatever plans make of it.
`... run --part 1/8 --into FILE` tries a part of it and adds a line of JSON for each; `... table FILE ...` takes those
into outcomes.json and writes the page; `... check` fails while fewer than 98% of the list are right.
"""
