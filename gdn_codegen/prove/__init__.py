"""Checkers of the results of passes. They import nothing from passes/, so that a mistake in a pass cannot hide itself here."""
