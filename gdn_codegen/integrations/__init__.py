"""Plug-ins: one module for each host, a library or an engine whose calls our ops then serve. docs/integrations.md lists them.

A plug-in calls our op where that takes the call, and else the host's own function. `report()` says what was done. The package
imports no host; a plug-in's module imports its own.
"""
from .calls import falling_back, record, refusal, report, reset

__all__ = ["falling_back", "record", "refusal", "report", "reset"]
