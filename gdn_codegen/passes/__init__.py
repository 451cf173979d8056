"""Passes: each takes a program and returns one. `pipelines` has their order, folders what they are about."""
