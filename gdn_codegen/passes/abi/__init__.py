"""Passes about the caller's tensors: input forms, states, and memory."""
