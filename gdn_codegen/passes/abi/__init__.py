"""Passes about the caller's tensors: forms of inputs, states, and memory."""
