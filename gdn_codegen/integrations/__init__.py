"""Plug-ins: one module for each host, a library or an engine whose calls our ops then serve. docs/integrations.md lists them.

A plug-in calls our op where that takes the call, and else the host's own function. `report()` says what was done. The package
imports no host; a plug-in's module imports its own.
"""
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .calls import falling_back, record, refusal, report, reset

__all__ = ["falling_back", "record", "refusal", "report", "reset"]


def __getattr__(name: str) -> Any:
    """What plug-ins share, imported when it is first asked for: it needs torch, and an entry point may find nothing to do."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(".calls", __name__), name)
