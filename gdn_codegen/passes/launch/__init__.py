"""How a kernel is launched: threads, registers, blocks that share a multiprocessor. Emitters print these numbers."""
