"""ring_bytes: the bytes of rings in shared memory. For Hopper's warp groups."""
from __future__ import annotations

from math import prod

from ...devices import Groups
from ...ir.core import Buffer, Kernel
from ...ir.types import BYTES

#: Tiles in shared memory begin at multiples of this number of bytes, and vectors at multiples of the other one.
ALIGN, ALIGN_VECTOR = 1024, 256
#: A copy unit writes vectors to multiples of so many bytes (PTX ISA, cp.async.bulk.tensor).
COPY_ALIGN = 128


def shared_bytes(k: Kernel, device: Groups, stages: int = 0) -> int:
    """The bytes of the rings of `k`. stages: the most slots that those of loads have, 0 for as many as `k` says."""
    filled = loaded(k)
    return sum(-(-bytes_of(b, stages if b.name in filled else 0) // (n := ALIGN if len(b.shape) > 1 else ALIGN_VECTOR)) * n
               for b in k.buffers if b.space == device.operand)


def loaded(k: Kernel) -> set[str]:
    """The buffers that loads fill."""
    return {o.buffer for o in k.ops if o.kind == "load"}


def bytes_of(b: Buffer, most: int = 0) -> int:
    """The bytes of a ring. most: of at most so many slots, where it is not 0."""
    return min(b.slots, most or b.slots) * (prod(b.shape) + slot_pad(b)) * BYTES[b.dtype]


def slot_pad(b: Buffer) -> int:
    """Elements after each slot of a ring of vectors, with which each slot begins where a copy may begin."""
    return -prod(b.shape) % (COPY_ALIGN // BYTES[b.dtype]) if len(b.dims) == 1 and b.slots > 1 else 0
