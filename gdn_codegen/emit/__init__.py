"""Emitters: a target's rules turn placed ops into text."""
from __future__ import annotations

from .base import EmitError, KernelText

__all__ = ["EmitError", "KernelText"]
