"""Devices as data: memory spaces, sizes, agents. Passes read this data."""
from __future__ import annotations

from dataclasses import dataclass, field, replace

from .cycle_model import CycleModel
from .part_cost import PartCost


@dataclass(frozen=True)
class Device:
    """A device.

    spaces: memory space -> its size in bytes, 0 if the target's compiler manages it.
    operand, product, loaded, vector, tile, number, summed: the space in which the pass `place` puts an operand of a product, the
    result of a product, a loaded value, a vector, another tile, a number, and a number that is the sum of a vector.
    agents: the agents that run ops. The first runs every op that no rule assigns to another.
    in_place: whether an accumulator may share its storage with the result, and a carried value with its next value.
    solves: the rows of the blocks that `diag_inverse` inverts, 0 if the device does not have this op.
    solves_whole: the rows of a tile that `diag_inverse` inverts as a whole, in 16 bit and in place; 0 for none.
    inverts_blocks: whether the diagonal blocks of an inverse are inverted separately (`Schedule.inverse_block`).
    async_loads: whether loads of tiles are asynchronous.
    staged: dtypes whose tiles are stored to global memory through the space "staged", which holds them by rows.
    part_cost: the cost of parts, for chunks of 64 tokens. None if sequences are not split into parts.
    splits_warm_up: whether the warm-up of a walk may be a separate loop, and parts with a long warm-up may start first.
    v_block: the columns of V that one instance of a walk computes by default, 0 for all columns.
    extents: the sizes of K and V that tiles may have, in ascending order.
    heads: the ways in which an instance can handle several value heads -> how many it handles (`passes/heads`).
    register_file: the number of registers of a multiprocessor.
    moved_loads: whether a load of a tile may begin some tokens before the chunk (`passes/algebra/recent_rows.py`).
    clears: whether kernels write zeros to output rows that no sequence covers. Otherwise the host does.
    decayed_block_rows: the rows of a block that an op computes of a decayed product (`passes/algebra/decayed_ops.py`): on Hopper
    the chunk. 0 if the device has no such op.
    """

    name: str
    target: str
    spaces: dict[str, int] = field(default_factory=dict)
    operand: str = "register"
    product: str = "register"
    loaded: str = "register"
    vector: str = "register"
    tile: str = "register"
    number: str = "register"
    summed: str = "register"
    agents: tuple[str, ...] = ("block",)
    in_place: bool = False
    solves: int = 0
    solves_whole: int = 0
    inverts_blocks: bool = False
    async_loads: bool = False
    staged: tuple[str, ...] = ()
    part_cost: PartCost | None = None
    splits_warm_up: bool = False
    v_block: int = 0
    extents: tuple[int, ...] = tuple(range(16, 257, 16))
    heads: dict[str, int] = field(default_factory=dict)
    register_file: int = 0
    moved_loads: bool = False
    clears: bool = True
    decayed_block_rows: int = 0

    def with_shared(self, kib: int) -> Device:
        """The device with so many KiB of shared memory for a block, if it counts that and kib is not 0."""
        if not kib or "shared" not in self.spaces:
            return self
        return replace(self, name=f"{self.name} with {kib} KiB", spaces={**self.spaces, "shared": kib * 1024})


#: Triton's compiler allocates registers and shared memory.
TRITON = Device("triton", "triton", {"register": 0}, v_block=64, extents=(16, 32, 64, 128, 256),
                splits_warm_up=True, moved_loads=True, decayed_block_rows=16,
                part_cost=PartCost(chunk_us=3.9, fold_us=10.0, launch_us=3.0, split_us=0.0, summary_us=15.0, warm_up_chunks=7,
                                   longest_warm_up_chunks=16, least_part_chunks=4, resident=2, idle_us=3.0, crowded=1.0))

#: One agent: the whole thread block. TileLang's compiler chooses the layout of fragments, and merges shared buffers by
#: lifetime. A block has 227 KiB of shared memory (CUDA C++ Programming Guide, compute capability 9.0), or what a schedule says
#: (`shared_kib`). Warps divide a product evenly if its rows and columns are multiples of 64, or are 16 and 32.
HOPPER = Device("hopper", "tilelang", {"shared": 227 * 1024, "staged": 0, "fragment": 0, "local": 0, "sum": 0}, operand="shared",
                product="fragment", loaded="shared", vector="shared", tile="fragment", number="local", summed="sum",
                in_place=True, solves=16, solves_whole=64,
                extents=(16, 32, 64, 128, 192, 256), async_loads=True, staged=("float16", "bfloat16"),
                heads={"threads": 16, "key_head": 1}, register_file=64 * 1024,
                part_cost=PartCost(chunk_us=10.0, fold_us=4.0, launch_us=8.0, split_us=0.0, summary_us=10.0, warm_up_chunks=6,
                                   longest_warm_up_chunks=16, least_part_chunks=14, resident=1, idle_us=8.0, crowded=1.0))


@dataclass(frozen=True)
class Cores(Device):
    """A device whose agents are cores that share no memory. Each core has pipes that run concurrently.

    runs: op -> the only agent that can run it. The first agent runs the other ops.
    copies: agent -> the number of its cores in a core group. Each core has an equal part of a tile's rows.
    home: agent -> the space of its values.
    feeds: the spaces of a product's two operands. They are filled from the home space.
    narrow: dtypes in which a product can be written to the home space directly.
    pipes: agent -> op -> pipe. "*" is for all other ops.
    unordered: pipes whose ops overlap unless a barrier separates them.
    issuer: the pipe that issues the ops of all other pipes, and waits for its own, which read entries of vectors.
    events: the number of ids for each pair of pipes. flags: the number of ids between agents. flag_limit: the limit of their
    counters. barrier_flags: further ids, of a barrier over the device.
    rates: (agent, pipe) -> bytes or multiply-adds in a cycle, for the order of ops.
    align: the alignment of buffers in bytes.
    column_scratch: (space, first byte, end) of memory that ops with a column operand overwrite. No buffer is placed there.
    cycle_models: the name of a time model -> what its instructions cost other than by the table of cycles. No pass reads it.
    """

    runs: dict[str, str] = field(default_factory=dict)
    copies: dict[str, int] = field(default_factory=dict)
    home: dict[str, str] = field(default_factory=dict)
    feeds: tuple[str, str] = ("", "")
    narrow: tuple[str, ...] = ()
    pipes: dict[str, dict[str, str]] = field(default_factory=dict)
    unordered: tuple[str, ...] = ()
    issuer: str = ""
    events: int = 0
    flags: int = 0
    flag_limit: int = 0
    barrier_flags: tuple[int, ...] = ()
    rates: dict[tuple[str, str], float] = field(default_factory=dict)
    align: int = 1
    column_scratch: tuple[str, int, int] = ("", 0, 0)
    cycle_models: dict[str, CycleModel] = field(default_factory=dict)


@dataclass(frozen=True)
class Groups(Device):
    """A device on which a thread block may consist of several warp groups, the agents of a walk. Kernels over chunks have one
    agent.

    The schedule gives the agents of a walk (schedule/agents.py). rows: the rows of a tile that a warp group of four warps holds.
    most: the most warp groups that share a carried value. threads: the most threads of a block. starts_early: whether a kernel
    may start before the one before it has ended.
    """

    rows: int = 0
    most: int = 0
    threads: int = 0
    starts_early: bool = False
