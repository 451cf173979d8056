"""Passes over loops: transposition, prefetch, the order of ops."""
