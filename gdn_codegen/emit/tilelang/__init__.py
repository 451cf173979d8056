"""TileLang: rules that give the text of placed ops. One thread block a (sequence or chunk slot, head, block)."""
from __future__ import annotations

from ..base import KernelText, Program
from .kernel import KernelWriter
from .rules import rule

__all__ = ["emit", "rule"]


def emit(p: Program, layout: str) -> list[KernelText]:
    """The kernels of a placed program."""
    return [KernelWriter(p, k, layout).text() for k in p.kernels]
