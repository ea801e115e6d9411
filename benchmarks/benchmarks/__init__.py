"""The ASV suite of all packages; its `_`-modules also serve pytest-benchmark and `ratios.py`."""
