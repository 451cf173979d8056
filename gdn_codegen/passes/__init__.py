"""Passes: each takes a program and returns a program. `pipelines` gives their order. A folder holds the passes of one subject."""
from . import pipelines as pipelines  # importing a pass declares it, and an error about stages names other passes
