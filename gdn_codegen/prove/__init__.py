"""Checkers of what passes produced. They import nothing from passes/, so that a mistake there does not hide itself here."""
