"""block_threads: chooses the threads of a block, and how many blocks share a multiprocessor. For TileLang.

A block of one agent has 128 threads, with these exceptions:
- 256, if with 128 threads the largest fragment would take more than 64 registers of each thread, or if fragments of a kernel over
  chunks that are live at once take more than 128, or if it has products, and tiles of more than 88 KiB in shared memory. But not
  if a product has 16 columns. TileLang may then give half of them to each of two warp groups, and a wgmma reads no row-major
  operand of 8 columns. On an H100 the kernel over chunks of Kimi Delta Attention took 1800 us with 128 threads, and
  690 with 256 (1 x 8192, 64 heads); that of gated linear attention 600 and 506. With device code that has registers of its own
  (`DECAYED`), fragments may take 96. With 80 gated linear attention takes 490 us in all, and 562 with 256 threads; with 112 nvcc
  took 209 registers for Kimi Delta Attention (H200, the same shape).
- 512, if those fragments are so many, shared memory has room for one block, and all products have 64 columns. That of RWKV-7 took
  3270 us with 256 threads, and 1950 with 512. Kernels with wider products were not timed.
- Fewer, if a product has fewer tiles of 16 x 16 than warps, or if no buffer has as many entries as threads.

Two blocks of 256 threads, each with fragments of at least 96 registers (`PAIRED`) or with such device code, share a
multiprocessor where shared memory has room for both. A thread then has 128 registers. On an H100 the kernel over chunks of GDN-2,
for which nvcc took 149, took 1094 us before, and 910 so. Kernels of derivatives of forms have no products, and up to 178
registers without this.

Kernels over single tokens are in token_threads.py.

A kernel over chunks is small if its largest fragment takes at most half of 64 registers per thread, and those that are live
at once at most 64. Then several blocks share a multiprocessor, so that one computes while another waits for its loads. Agents
that share a block have threads and registers of their own. Such a block has whole warp groups, and each thread starts with an
equal part of the registers.
"""
from __future__ import annotations

from dataclasses import replace
from math import prod

from ...devices import Device
from ...ir.core import Kernel, Program
from ...ir.types import BYTES, GROUP, WARP
from ..stage import takes
from ..storage.live_bytes import live_bytes, packed_bytes, two_fit
from ..storage.stored_values import DECAYED
from .token_threads import MOST_OF_A_FRAGMENT, fragments, of_tokens

#: Registers of a thread of a small kernel, and of one with more than two heads, which would spill with fewer.
SMALL, SMALL_BATCHED = 64, 80
#: Threads of a block that runs several heads. Each has few entries, and nvcc issues their loads together. Then the registers
#: of a thread, with which eight blocks share a multiprocessor.
HEADS_THREADS, HEADS_REGISTERS = 256, 32
#: The most registers of a thread that fragments of a kernel over chunks may take at once. Beyond that, more threads share them.
MOST_LIVE = 128
#: The same for the bytes of its tiles in shared memory. The kernel that was timed has 96 KiB, so that two blocks share a
#: multiprocessor; none with less was.
MOST_SHARED = 88 * 1024
#: The registers of a thread that fragments take at once in kernels for which nvcc may take more than two blocks have.
PAIRED = 96


@takes("placed")
def block_threads(p: Program, device: Device) -> Program:
    """`p` with threads, registers and blocks of a multiprocessor on its kernels. Registers come from the device."""
    return p.map_kernels(lambda k: _launched(p, k, device))


def _launched(p: Program, k: Kernel, device: Device) -> Kernel:
    """The kernel with its numbers."""
    if k.agents:
        threads = -(-sum(a.threads for a in k.agents) // GROUP) * GROUP
        return replace(k, threads=threads, registers=device.register_file // threads)
    if any(o.attr("one_token") for o in k.ops):
        return of_tokens(p, k, device)
    by_threads = k.batch.way == "threads"
    threads = HEADS_THREADS if by_threads else _threads(k, device)
    if k.grid != "chunks" or not (by_threads or _small(k, threads)):
        return _paired(k, threads, device)
    registers = HEADS_REGISTERS if by_threads else SMALL_BATCHED if k.batch.heads > 2 else SMALL
    return replace(k, threads=threads, registers=registers, blocks_per_sm=device.register_file // (registers * threads))


def _paired(k: Kernel, threads: int, device: Device) -> Kernel:
    """The kernel, with registers for two blocks of a multiprocessor if it is over chunks and has 256 threads and needs many, and
    shared memory has room for both."""
    many = live_bytes(k, "fragment") >= PAIRED * threads * BYTES["float32"] or any(o.kind in DECAYED for o in k.ops)
    if not many or threads != 2 * GROUP or k.grid != "chunks" or not two_fit(k, device):
        return replace(k, threads=threads)
    return replace(k, threads=threads, registers=device.register_file // (2 * threads), blocks_per_sm=2)


def _small(k: Kernel, threads: int) -> bool:
    """Whether the kernel has products and 128 threads at most, its largest fragment takes at most half of `SMALL` registers per
    thread, and those that are live at once at most `SMALL`."""
    live = live_bytes(k, "fragment") // BYTES["float32"]
    return threads <= GROUP and any(o.kind == "matmul" for o in k.ops) and max(2 * fragments(k), live) <= SMALL * threads


def _threads(k: Kernel, device: Device) -> int:
    """The threads of a block with one agent."""
    shapes = {b.name: b.shape for b in k.buffers}
    products = [shapes[o.buffer] for o in k.ops if o.kind == "matmul"]
    shared = packed_bytes(k) if k.grid == "chunks" and products else 0
    most = PAIRED if any(o.kind in DECAYED for o in k.ops) else MOST_LIVE
    live = k.grid == "chunks" and live_bytes(k, "fragment") > most * GROUP * BYTES["float32"]
    large = live or shared > MOST_SHARED or fragments(k) > MOST_OF_A_FRAGMENT * GROUP
    large = large and all(shape[-1] > 16 for shape in products)
    alone = live and 2 * shared > device.spaces["shared"] and all(shape[-1] == 64 for shape in products)
    tiles = [prod(n // 16 for n in shape) for shape in products]
    entries = max((prod(b.shape) for b in k.buffers), default=1)
    return WARP * min([16 if alone else 8 if large else 4, -(-entries // WARP), *tiles])
