"""Proves that a schedule's transfers can be completed, and finds what they need; pure."""
