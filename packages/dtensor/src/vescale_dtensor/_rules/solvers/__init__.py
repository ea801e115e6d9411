"""Helpers of single families of rules: cuts carried through views, parts that meet, owned rows.

The solver of most functions is not here: a rule returns a `Signature`, and `_dispatch/signature.py` (`solve`,
`_choices`) makes the decision of it.
"""
