"""The emitter for TileLang. Rules give the text of placed ops.

One thread block runs one (sequence, part or chunk slot; value head; block of the blocked dim), or several value heads.
"""
from __future__ import annotations

from ..base import Heads, KernelText, Program, no_heads
from . import decayed_rules, group_rules, turn_rules  # noqa: F401  which fill the tables
from .groups import GroupsWriter
from .heads import HeadsWriter
from .kernel import KernelWriter
from .rules import rule

__all__ = ["emit", "rule"]


def emit(p: Program, layout: str, heads: Heads = None) -> list[KernelText]:
    """The kernels of a placed program."""
    no_heads("tilelang", heads)
    return [(GroupsWriter if k.agents else HeadsWriter if k.batch.way == "threads" else KernelWriter)(p, k, layout).text()
            for k in p.kernels]
