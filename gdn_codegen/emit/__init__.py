"""Emitters. Each target has rules that give the text of lowered ops."""
from __future__ import annotations

from .base import EmitError, KernelText

__all__ = ["EmitError", "KernelText"]
