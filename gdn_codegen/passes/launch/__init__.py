"""Passes that choose how a kernel is launched: threads, registers, blocks on a multiprocessor. Emitters print these numbers."""
