"""Foundations of a dry run: metering a run on meta tensors, and operators that torch lacks there."""
