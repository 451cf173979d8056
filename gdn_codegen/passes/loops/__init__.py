"""Passes over loops: transposition, prefetch, batching of heads, the order of ops."""
