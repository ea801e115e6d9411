"""Experts in a ModuleList, which the block's own forward calls: what one call of the block is made of (`lists.py`)."""
