"""Passes that choose where each value is stored on the chip, and in which layout."""
