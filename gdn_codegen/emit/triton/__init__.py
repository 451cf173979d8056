"""Triton: rules that give the text of placed ops. One program instance a (sequence or chunk slot, head, block).

In a bfloat16 module tiles have dtype OPERAND, bfloat16 on a GPU and float32 in Triton's interpreter, which multiplies the
bits of bfloat16 as integers and truncates where it should round; the template's `rounded` gives the same numbers in both.
"""
from __future__ import annotations

from ..base import Heads, KernelText, Program, no_heads
from .kernel import KernelWriter
from .rules import rule

__all__ = ["emit", "rule"]


def emit(p: Program, layout: str, heads: Heads = None) -> list[KernelText]:
    """The kernels of a placed program."""
    no_heads("triton", heads)
    return [KernelWriter(p, k, layout).text() for k in p.kernels]
