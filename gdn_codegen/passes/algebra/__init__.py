"""Passes that change what is computed: canonical form, rewrites, decomposition, precision."""
