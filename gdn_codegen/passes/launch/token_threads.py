"""The threads of a block over single tokens, and how many blocks share a multiprocessor. For TileLang.

A kernel over single tokens has one warp. So many of its blocks share a multiprocessor as an estimate of its registers allows:
it is limited by memory, and more loads are then under way at once. Above MOST_OF_A_FRAGMENT registers for the state nvcc
decides.
"""
from __future__ import annotations

from dataclasses import replace
from math import prod

from ...devices import Device
from ...ir.core import Kernel, Op, Program, loops, walk
from ...ir.types import BYTES, WARP

#: The most registers of a thread that the largest fragment may take. Beyond that, more threads share the fragment.
MOST_OF_A_FRAGMENT = 64
#: Registers of a thread over single tokens: those for the state, so many for each entry of a vector, and others. At least twice
#: those for the state, and LEAST, since groups of tokens need many. On an H100 256 sequences of 4 tokens took 289 us with 128
#: registers, and 324 with nvcc's 161 (16 columns, before tokens had groups). One sequence of one token took 2.53 us with 20
#: blocks a multiprocessor, which leave 96, and 2.67 with 16 (8 columns, states in bfloat16). 21 blocks leave 80, and spill: each
#: quarter of a multiprocessor has its own registers.
OF_A_VECTOR, OF_OTHERS, LEAST = 3, 16, 100
#: A thread has at least so many columns of a row. Then the most threads that share a row, and the bytes that each moves at once.
COLUMNS, MOST_LANES, AT_ONCE = 8, 8, 16


def of_tokens(p: Program, k: Kernel, device: Device) -> Kernel:
    """The kernel over single tokens with one warp a block, and as many blocks a multiprocessor as its registers allow.

    A row of a state has at least so many threads that all threads have rows. In memory it is cut into pieces of 16 bytes, and
    neighbouring threads move neighbouring pieces: each access then covers whole sectors of memory."""
    rows, columns = next((b.shape for b in k.buffers if len(b.shape) == 2 and isinstance(b.dims[0], str)), (WARP, COLUMNS))
    lanes = max(1, min(columns // COLUMNS, MOST_LANES), WARP // rows)
    piece = min(columns // lanes, AT_ONCE // max((BYTES[t.dtype] for t in p.tensors if t.index == "sequence"), default=2))
    state = fragments(k) // WARP
    if state > MOST_OF_A_FRAGMENT:
        return replace(k, threads=WARP, lanes=lanes, piece=piece)
    along = max(rows * lanes // WARP, columns // lanes)  # entries of a vector that a thread has
    registers = max(LEAST, 2 * state, state + OF_A_VECTOR * along + OF_OTHERS)
    if kept := _kept(k) // WARP:
        registers += kept + OF_OTHERS
    return replace(k, threads=WARP, lanes=lanes, piece=piece, registers=registers,
                   blocks_per_sm=device.register_file // (registers * WARP))


def _kept(k: Kernel) -> int:
    """Registers of all threads for tiles from before a loop that its ops read, such as an initial state to which they return."""
    read = {a for lp in loops(k.body) for o in walk(lp.body) for a in o.args}
    kept = {o.buffer: BYTES[o.type.dtype] for o in k.body if isinstance(o, Op) and o.out in read and o.buffer and o.type}
    return sum(prod(b.shape) * kept[b.name] // BYTES["float32"] for b in k.buffers if b.name in kept and len(b.shape) == 2)


def fragments(k: Kernel) -> int:
    """Entries of the largest fragment."""
    return max((prod(b.shape) for b in k.buffers if b.space == "fragment"), default=0)
