"""Calls of functions on DTensors."""
