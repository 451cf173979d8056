"""Passes that rewrite what is computed: canonical forms, decomposition, precision."""
