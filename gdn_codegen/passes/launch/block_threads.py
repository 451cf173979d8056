"""block_threads: threads of a block, and how many blocks share a multiprocessor (CUDA).

A block of one agent has 128 threads; 256 where its largest fragment would take more than 64 registers of each of 128; fewer
where a product has fewer 16 x 16 tiles than that many warps, or no buffer as many entries as threads. It stays at 128 where a
product has 16 columns: TileLang may give each of two warp groups half of them, and a wgmma reads no row-major operand of 8
columns.

A kernel over chunks is small where accumulators leave half of 64 registers a thread. Then more blocks share a multiprocessor, and
one computes while another waits for its loads. Agents that share a block have threads and registers of their own; the block has
whole warp groups, each thread of which starts with an equal part of the registers.
"""
from __future__ import annotations

from dataclasses import replace
from math import prod

from ...devices import Device
from ...ir.core import Kernel, Program, walk
from ..stage import takes

#: Threads of a warp, and of a warp group, for which registers are set.
WARP, GROUP = 32, 128
#: Registers that a thread of a small kernel gets; with four heads together it would spill.
SMALL, SMALL_TOGETHER = 64, 80
#: Threads of a block that runs several heads: few entries for each, whose loads nvcc begins together. And registers of
#: each: eight blocks share a multiprocessor.
HEADS_THREADS, HEADS_REGISTERS = 256, 32
#: Registers of a thread that the largest fragment may take before more threads share it.
MOST_OF_A_FRAGMENT = 64


@takes("placed")
def block_threads(p: Program, device: Device) -> Program:
    """`p` with threads, registers and blocks of a multiprocessor on its kernels. `device.register_file` is shared out."""
    return p.map_kernels(lambda k: _launched(k, device))


def _launched(k: Kernel, device: Device) -> Kernel:
    if k.agents:
        threads = -(-sum(a.threads for a in k.agents) // GROUP) * GROUP
        return replace(k, threads=threads, registers=device.register_file // threads)
    threads = HEADS_THREADS if k.heads_per_block > 1 else _threads(k)
    if k.grid != "chunks" or not (k.heads_per_block > 1 or _small(k, threads)):
        return replace(k, threads=threads)
    registers = HEADS_REGISTERS if k.heads_per_block > 1 else SMALL_TOGETHER if k.lanes > 2 else SMALL
    return replace(k, threads=threads, registers=registers, blocks_per_sm=device.register_file // (registers * threads))


def _fragments(k: Kernel) -> int:
    """Entries of the largest fragment."""
    return max((prod(b.shape) for b in k.buffers if b.space == "fragment"), default=0)


def _small(k: Kernel, threads: int) -> bool:
    """Whether `SMALL` registers a thread are enough: accumulators take half of them at most."""
    return any(o.kind == "matmul" for o in walk(k.body)) and 2 * _fragments(k) <= SMALL * threads


def _threads(k: Kernel) -> int:
    shapes = {b.name: b.shape for b in k.buffers}
    products = [shapes[o.buffer] for o in walk(k.body) if o.kind == "matmul"]
    large = _fragments(k) > MOST_OF_A_FRAGMENT * GROUP and all(shape[-1] > 16 for shape in products)
    tiles = [prod(n // 16 for n in shape) for shape in products]
    entries = max((prod(b.shape) for b in k.buffers), default=1)
    return WARP * min([8 if large else 4, -(-entries // WARP), *tiles])
