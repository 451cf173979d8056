"""Emitters: a target's rules turn placed ops into text."""
from __future__ import annotations

from collections.abc import Callable

from ..ir.core import Program
from . import pto, tilelang, triton
from .base import EmitError, Heads, KernelText

#: target -> (program, layout, head counts compiled in) -> the kernels' text
EMITTERS: dict[str, Callable[[Program, str, Heads], list[KernelText]]] = {
    "tilelang": tilelang.emit, "triton": triton.emit, "pto": pto.emit}

__all__ = ["EMITTERS", "EmitError", "KernelText"]
