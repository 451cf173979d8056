"""What a device has, as data: memory spaces, sizes, agents. Passes read it; nothing here computes."""
from __future__ import annotations

from dataclasses import dataclass, field

from .part_cost import PartCost


@dataclass(frozen=True)
class Device:
    """A device, for passes. spaces: bytes of each memory space, 0 where a compiler manages it.

    The next fields name the space in which `place` puts a value: an operand of a product, a product's result, what was
    loaded, a vector, another tile, a number. agents: who can run ops; the first also runs what no rule assigns.
    in_place: an accumulator and a carried value may share the storage of what they become. solves: rows of the blocks that
    a `diag_inverse` takes, 0 where there is none; solves_whole: rows of a whole tile that one takes in 16 bit, and overwrites.
    async_loads: whether loads of tiles are asynchronous. joined: whether a tile of tokens is transposed as it is read from shared
    memory, so that threads subtract from it what waits for the state; else products read it in its own layout.
    staged: dtypes whose tiles pass through the space "staged" on their way to memory, a row at a time there. part_cost: what
    parts of a sequence cost, in chunks of 64 tokens; None where sequences have no parts. splits_warm_up: whether the warm-up
    of a walk may be a loop of its own, and parts with a long one may come first. v_block: columns of V that an instance of a
    walk computes where the schedule leaves it open, 0 for all. extents: those that tiles may have of K and V, in order.
    heads_per_block: value heads that one thread block computes in kernels with one value per token and head. register_file:
    registers of a multiprocessor. clears: whether kernels clear rows of outputs that no sequence covers; else the host does.
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
    agents: tuple[str, ...] = ("block",)
    in_place: bool = False
    solves: int = 0
    solves_whole: int = 0
    async_loads: bool = False
    joined: bool = False
    staged: tuple[str, ...] = ()
    part_cost: PartCost | None = None
    splits_warm_up: bool = False
    v_block: int = 0
    extents: tuple[int, ...] = tuple(range(16, 257, 16))
    heads_per_block: int = 1
    register_file: int = 0
    clears: bool = True


#: Triton's compiler allocates registers and shared memory itself.
TRITON = Device("triton", "triton", {"register": 0}, v_block=64, extents=(16, 32, 64, 128, 256),
                splits_warm_up=True,
                part_cost=PartCost(chunk_us=3.9, fold_us=10.0, launch_us=3.0, summary_us=15.0, warm_up_chunks=7,
                                   longest_warm_up_chunks=16, least_part_chunks=4, resident=2))

#: One thread block; TileLang's compiler lays out fragments and merges shared buffers by lifetime. 227 KiB a block
#: (CUDA C++ Programming Guide, compute capability 9.0). Warps share products of 64 rows and columns, or of 16 and 32, evenly.
HOPPER = Device("hopper", "tilelang", {"shared": 227 * 1024, "staged": 0, "fragment": 0, "local": 0}, operand="shared",
                product="fragment", loaded="shared", vector="shared", tile="fragment", number="local", in_place=True, solves=16,
                solves_whole=64,
                extents=(16, 32, 64, 128, 192, 256), async_loads=True, staged=("float16", "bfloat16"), heads_per_block=16,
                register_file=64 * 1024,
                part_cost=PartCost(chunk_us=10.0, fold_us=4.0, launch_us=8.0, summary_us=10.0, warm_up_chunks=6,
                                   longest_warm_up_chunks=16, least_part_chunks=14, resident=1))


@dataclass(frozen=True)
class Cores(Device):
    """A device whose agents are cores that share no memory, each with pipes that run side by side.

    runs: ops that only one agent can do; the first agent does the rest. copies: cores of an agent in a core group, each
    with an equal part of a tile's rows. home: the space of an agent's values. feeds: the spaces of a product's two
    operands, filled from home. narrow: dtypes in which a product goes straight to home. pipes: agent -> op -> pipe, "*"
    for the rest. unordered: pipes whose ops overlap unless a barrier parts them. issuer: the pipe that issues all others
    and waits for its own ops. events: ids of a pair of pipes; flags: ids between agents, each counting to flag_limit.
    rates: what a pipe does in a cycle, for an order: bytes, or multiply-adds.
    align: bytes. column_scratch: the bytes of a space that ops with a column operand overwrite; no value lies there.
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
    rates: dict[tuple[str, str], float] = field(default_factory=dict)
    align: int = 1
    column_scratch: tuple[str, int, int] = ("", 0, 0)


@dataclass(frozen=True)
class Groups(Device):
    """A device whose thread block may be warp groups. Kernels over chunks keep one agent, `agents`.

    Which agents a walk has, a schedule says (schedule/agents.py). rows: of a tile that a warp group of four warps holds.
    most: warp groups that share a carried value. threads: the most of a block.
    """

    rows: int = 0
    most: int = 0
    threads: int = 0
