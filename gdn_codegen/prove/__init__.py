"""Checkers of what passes produced. They import nothing from passes/sync."""
