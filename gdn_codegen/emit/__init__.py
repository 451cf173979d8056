"""Emitters: a target's rules turn placed ops into text."""
from __future__ import annotations

from collections.abc import Callable

from ..ir.core import Program
from . import pto, tilelang, triton
from .base import EmitError, KernelText

#: target -> (program, layout) -> the kernels' text
EMITTERS: dict[str, Callable[[Program, str], list[KernelText]]] = {
    "tilelang": tilelang.emit, "triton": triton.emit, "pto": pto.emit}

__all__ = ["EMITTERS", "EmitError", "KernelText"]
