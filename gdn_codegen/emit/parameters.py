"""The parameters of a kernel: the tensors that it touches, and the integers that it takes besides sizes. Emitters share them."""
from __future__ import annotations

import math

from ..ir.core import Kernel, Program
from ..ir.types import Tensor

#: The parameter with the number of chunks between two checkpoints.
EVERY = "checkpoint_chunks"
#: The parameter that is nonzero if the host launches the kernels for the summaries of parts.
SUMMED = "summed"
#: The parameter with the number of the part that a kernel with `by_part` is launched for.
PART = "part_number"

#: Suffix, after the name of a tensor of integers, of the parameter with the number of them that a sequence has.
WIDTH_OF = "_width"
#: Prefix, before the name of an output, of the parameter that is nonzero if the kernel clears the rows that no sequence covers.
CLEAR = "clear_"
#: The parameter with the number of blocks that the GPU runs at a time, for a kernel whose blocks take several instances each.
AT_A_TIME = "blocks_at_a_time"
#: The parameters of a kernel that chooses the chunks of a part: the fewest, the instances of a part, and how many instances run
#: at a time. That is 0 if the host has chosen them, also in the kernels that have such parts.
LEAST_SPAN, INSTANCES, UNITS = "least_span", "part_instances", "units"


def touched(p: Program, k: Kernel) -> tuple[Tensor, ...]:
    """The tensors for which a kernel has pointer parameters, in the program's order.

    These are the tensors that it loads or stores, the tensors with the numbers of their tiles, and the one that marks skipped
    sequences.
    """
    reads = ("load", "store", "warm_up_length", "scalar", "resume", "clear_counter", "claim_item", "set_if_negative",
             "return_if_zero", "return_if_set", "choose_parts")
    named = {k.places, *(o.attr(x) for o in k.ops if o.kind in reads for x in ("tensor", "kept", "parents"))}
    used = [t for t in p.tensors if t.name in named]
    names = {t.over or t.name for t in used} | {t.at for t in used} | {p.skips}
    names |= {t.at for t in p.tensors if t.name in names}
    return tuple(t for t in p.tensors if t.name in names)


def strides(t: Tensor) -> tuple[str, ...]:
    """The names of the parameters with a tensor's strides: of batch, token and head. There are none if it is not strided."""
    return tuple(f"{t.name}_stride_{x}" for x in ("b", "t", "h")) if t.strided else ()


def stride_unit(p: Program, t: Tensor) -> int:
    """A number of elements that divides the strides of a dense tensor: 16 bytes of elements, or less if a row is no multiple."""
    return math.gcd(p.shape(t)[-1], 4 if t.dtype == "float32" else 8) if len(t.dims) > 1 else 1


def integers(p: Program, k: Kernel) -> tuple[str, ...]:
    """The names of a kernel's integer parameters, besides sizes.

    In order: whether optional tensors are given, the strides of tensors whose tiles lie where integers say, how many integers a
    sequence has, the chunks between checkpoints, whether summaries of parts are computed, whether outputs are cleared, the
    blocks that run at a time, what the chunks of a part are chosen by, strides of strided tensors.
    """
    tensors = touched(p, k)
    stored = [p.tensor(o.attr("tensor")) for o in k.ops if o.kind == "store"]
    return (*(f"has_{t.name}" for t in tensors if t.optional), *(f"{t.name}_stride" for t in tensors if is_pool(t)),
            *(f"{t.name}{WIDTH_OF}" for t in tensors if t.index == "numbers"),
            *([EVERY] if any(t.index == "checkpoint" and not t.at for t in stored) else []),
            *([SUMMED] if k.start == "unless_summed"
              or any(o.kind == "warm_up_length" and o.attr("tensor") and not o.attr("longest") for o in k.ops) else []),
            *(f"{CLEAR}{t.name}" for t in p.clears(k)),
            *([AT_A_TIME] if any(o.kind == "claim_item" for o in k.ops) else []),
            *([LEAST_SPAN, INSTANCES, UNITS] if any(o.kind == "choose_parts" for o in k.ops) else [UNITS] if k.places else []),
            *(x for t in tensors for x in strides(t)))


def own_numbers(p: Program, k: Kernel) -> tuple[Tensor, ...]:
    """The tensors of integers of which a kernel reads one for its sequence, in an order in which they can be read."""
    tensors = touched(p, k)
    lie = {t.at for t in p.tensors if t.index == "sequence"}
    return tuple(t for t in tensors if t.index == "number") + tuple(t for t in tensors if t.index == "numbers" and t.name in lie)


def is_pool(t: Tensor) -> bool:
    """Whether the tiles of `t` lie where integers say, so that kernels take it as a flat tensor, with a stride."""
    return bool(t.at) and t.index != "numbers"
