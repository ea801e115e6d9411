"""The ASV suite of all packages; its `cases/` and `models/` also serve pytest-benchmark and `ratios.py`."""
