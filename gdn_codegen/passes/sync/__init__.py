"""Passes that derive waits, barriers and asynchronous copies."""
