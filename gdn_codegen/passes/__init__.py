"""Passes: each takes a program and returns a program. `pipelines` gives their order. A folder holds the passes of one subject."""
