"""Plans of gradients, as data: what a target offers for the two builds of a gradient (`Target.gradients`).

`runtime/call/gradient_builds.py` makes builds of them: one for the states before chunks, and one that walks back.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..ir.stored import Solved
from ..schedule import named
from ..schedule.schedule import PREPARED

#: A named schedule, and fields of it that have other values.
Varied = tuple[str, dict[str, Any]]


@dataclass(frozen=True)
class GradientPlan:
    """Schedules with changed fields: that of a gradient, and those of the states before chunks, of which the first that fits is
    taken. narrow: states before chunks have the dtype of q between the two. arch: of builds for one architecture. most: tokens
    of the largest chunk. solved: what the states' module also gives, and the gradient reads. rank: plans for the few sizes that
    no plan of a lower one fits have a higher one."""

    gradient: Varied
    states: tuple[Varied, ...]
    narrow: bool = False
    arch: str = ""
    most: int = 128
    solved: Solved = ""
    rank: int = 0

    @property
    def late(self) -> bool:
        """Whether the walk back leaves sums to the last kernel (`late_sums`)."""
        return any("@state_solution" in g for g in self.gradient[1].get("kernels", ()))


def late_sums(kernels: tuple[tuple[str, ...], ...]) -> dict[str, Any]:
    """The field of groups with a walk that leaves those solutions to the last kernel on which no state depends. A solution that
    sums over V keeps a walk from having blocks of V."""
    return {"kernels": tuple(tuple("@state_solution" if n == "@solution" else n for n in g) for g in kernels)}


#: One kernel, and states in float32. For devices on which launches cost little, and pages that fit no other plan.
ONE = GradientPlan(("fused", {}), (("fused", {}),))
#: The field of a schedule whose sequences come in parts.
IN_PARTS = {"partition": "decay"}
#: Walks for the states before chunks, the preferred one first.
STATE_WALKS: tuple[Varied, ...] = (
    ("fused_walk", {}), ("operand_walk", {"v_block": 64}), ("operand_walk", {}), ("walk", {}))


def _storing(*before: tuple[str, ...], **fields: Any) -> tuple[Varied, ...]:
    """Walks for the states of pages with a gate for each channel that also store what the gradient reads of a chunk's inputs
    alone, the preferred one first. In form `unit` the walk reads the inverse as the gradient does. before: the groups of the
    kernels over chunks: conversions of inputs, and what stores that."""
    kernels = (*before, ("@output", "@state"))
    return tuple(("operand_walk", {"kernels": kernels, "form": "unit", **fields, **x})
                 for x in ({"v_block": 64, **IN_PARTS}, {"v_block": 64}, {}))


#: These for one kernel over chunks, and for two, of which the second has products of pairs of tokens in pieces of K. On Hopper
#: elementwise conversions are in the kernel over chunks: with gates of -5 or more promised, a kernel of their own for
#: the bound took 132 us, and its derivative 204 (KDA, 1 x 8192, 64 heads, an H200: 3118 us in all, and 2858 without these).
STORING_WALKS = _storing(("@normed",), ("@gate_sum", "@operand", "@gate", "@stateless"))
STORING_BY_PIECES = _storing(("@converted",), ("@gate_sum", "@gate", "@stateless_keyed"),
                             ("@inverse", "@operand", "@stateless"), k_piece=16)
#: Three kernels: over chunks, the walk back for the derivative by the state alone, over chunks again; one more where inputs have
#: forms. On an H100 the gradient of 1 x 8192 tokens with 64 heads of Gated DeltaNet took 2.2 ms in TileLang with a walk in halves
#: of V, 0.3 ms more whole. With a gate for each channel walks for states read operands that another kernel computed. Where a page
#: bounds what tokens forget, by a number, walks come in parts: with 16 heads and 32768 tokens that took 2.1 ms, not 3.0, and in
#: Triton 4.9, not 6.8. On Hopper's warp groups one walk in parts computes all outputs: 1.35 ms, not 1.87. There the walk of the
#: states also stores what solves each chunk's system, and its inverse: both modules took 1.22 ms so, not 1.43.
THREE = GradientPlan(("gradient", {"v_block": 64}), (("walk", IN_PARTS), *STATE_WALKS), narrow=True)
#: The schedule for pages with a gate for each channel: more kernels, with fewer products each, most of them for half of the
#: channels. In Triton with chunks of 32 tokens its kernels spill up to 0.5 KB a thread for KDA, those of FIVE with 64 up to 6 KB:
#: the gradient of 1 x 8192 tokens with 64 heads took 8.2 ms, not 21.5 (H100, with its states).
BY_CHANNELS = "channel_gradient"
#: Its kernels where the states' module gives what solves each chunk's system. Scores are computed where they are read.
OF_SOLUTIONS = tuple(g for g in named(BY_CHANNELS).kernels if "@score" not in g)
#: The same for Triton, where the derivative of a gate's form has a kernel of its own. Beside d_k a layer's call of KDA took
#: 6305 us instead of 6090 (1 x 8192, 64 heads, an H200), and with a bound alone 5365 instead of 5315.
OF_SOLUTIONS_APART = tuple(tuple(n for n in g if n != "@elementwise") for g in OF_SOLUTIONS)
#: The schedule with one walk for all outputs. Without decays it comes last: with gates of 0 `gradient` was faster.
ONE_WALK = "fused_gradient"
#: For cores with little memory: a kernel for all gradients of a chunk, and a walk for the derivative by the state alone.
BY_CHUNKS = GradientPlan(("prepared", {}), (("prepared", {}),))
#: The same for K and V above 128: walks for blocks of V, and kernels over chunks that have some columns of a state at a time.
BY_PIECES = tuple(
    GradientPlan(("prepared", {"v_block": n, "v_piece": n, "order": "page", **x}), (("prepared", {"v_block": n}),), rank=bool(x))
    for x in ({}, late_sums(PREPARED)) for n in (64, 32, 16))
