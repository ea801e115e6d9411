"""flex_attention on shards.

torch's function and the two that make its masks ask no operand's class, and are compiled as a whole. `door` is where
they come to dispatch, `captured` finds the tensors that users' functions of places have with them and puts others in
their place, `blocks` cuts a block mask and tells these functions global places, `call` is one call of it all, and
`kernel` is what runs on a rank's shards. The rule, which decides layouts, is `_rules/products/flex.py`.

Source: Flex Attention (Dong et al., arXiv 2412.05496).
"""
