"""early_tails: lets an agent begin its copies of a ragged tail one after another, before it waits for the first. A part of
`mbarriers`.

The slots must be free when copies begin. This module does not look: the checker (`prove/rings.py`) must accept the kernel, or
`mbarriers` keeps the one without. It is all or nothing, so that it costs one more check of the kernel.

An agent waits for the copy of a ragged tail and sets rows past the sequence's end to zero, before it goes on. Sequences of one
chunk have nothing else to load, so these copies would come one after another.

Example:
    before:  k = load k (tail); q = load q; v = load v (tail)
    after:   k = load k (tail; begins that of v, too); q = load q; v = load v (tail; begun with k)
"""
from __future__ import annotations

from dataclasses import replace

from ...ir.core import Kernel, map_ops


def early_tails(k: Kernel) -> Kernel:
    """The kernel in which each agent begins its copies of ragged tails with its first one in the loop."""
    first: dict[str, str] = {}
    begun = {o: first[o.agent] for o in k.ops if o.attr("tail") and first.setdefault(o.agent, o.out) != o.out}
    return replace(k, body=map_ops(k.body, lambda o: [o.with_attrs(begun=begun[o]) if o in begun else o]))
