"""The emitter for Triton. Rules give the text of placed ops.

One program instance runs one (sequence, part or chunk slot; value head; block of the blocked dim).

In a bfloat16 module, tiles have the dtype OPERAND: bfloat16 on a GPU, and float32 in Triton's interpreter. The interpreter
multiplies bfloat16 wrongly (it takes the bits as integers), and it truncates instead of rounding. The device function
`rounded` gives the same numbers in both.
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
