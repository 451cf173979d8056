"""Passes about the caller's side: forms of inputs, states, memory."""
