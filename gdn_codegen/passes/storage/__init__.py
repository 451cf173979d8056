"""Passes that give each value a place on the chip."""
