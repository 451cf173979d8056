"""Types of the IR: tiles with symbolic dims, tensors in global memory, buffers and agents of a kernel, and the units in which
bytes and threads count."""
from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import lru_cache

#: How an instance handles several value heads (`Batch.way`).
WAYS = {
    "interleaved": "each op stands in the body once for each head, so that the ops of the heads alternate. A head past the last "
                   "repeats the last head",
    "key_head": "the heads are those of one key head. Ops of the key head stand once in the body, and others once for each head",
    "columns": "loads and stores move the values of all heads, which are the columns of a tile",
    "threads": "the body is that of one head. Each buffer has a row for each head, and the threads of a block compute all rows",
}
Dim = str | int
#: Bytes of an entry of each dtype that a tile may have.
BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
FLOATS = tuple(BYTES)
#: The accepted values of Buffer.layout, each with the rank of such a buffer.
LAYOUTS = {"swizzled": 2, "rows": 2, "columns": 2, "state_rows": 2, "along_columns": 1, "along_rows": 1, "token_rows": 2}
#: The columns side by side that a thread has in the layout "columns".
COLUMNS_OF_A_THREAD = 2
#: Threads of a warp, warps of a warp group, and threads of a warp group, for which registers are set.
WARP, WARPS_OF_GROUP = 32, 4
GROUP = WARP * WARPS_OF_GROUP


@dataclass(frozen=True)
class Tile:
    """The type of a tile. A dim is a symbolic name ("C" for the tokens of a chunk, "K", "V") or a number. () is a scalar."""

    dims: tuple[Dim, ...] = ()
    dtype: str = "float32"
    #: 0 for a number, 1 for a vector, 2 for a matrix.
    rank: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.dtype not in FLOATS:
            raise ValueError(f"tile dtype: got {self.dtype!r}, accepted are {', '.join(FLOATS)}")
        object.__setattr__(self, "rank", len(self.dims))

    def shape(self, sizes: dict[str, int]) -> tuple[int, ...]:
        """The shape in elements. `sizes` gives the size of each symbolic dim."""
        return tuple([d if isinstance(d, int) else sizes[d] for d in self.dims])

    def with_dtype(self, dtype: str) -> Tile:
        """The same dims in another dtype."""
        return Tile(self.dims, dtype)

    @property
    def transposed(self) -> Tile:
        """The dims in reverse order."""
        return Tile(self.dims[::-1], self.dtype)

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.dims))}]"


@dataclass(frozen=True)
class Batch:
    """The value heads that one instance of a kernel over chunks handles. heads: how many, consecutive ones. way: how, a key of
    WAYS; "" for one head."""

    heads: int = 1
    way: str = ""

    def __post_init__(self) -> None:
        if self.heads < 1 or (self.way not in WAYS if self.heads > 1 else self.way != ""):
            raise ValueError(f"batch: got {self.heads} heads, way {self.way!r}; accepted: 1 head and '', or more heads and "
                             f"{' or '.join(WAYS)}")

    @property
    def in_body(self) -> int:
        """The heads that one run of the kernel's body computes."""
        return 1 if self.way == "threads" else self.heads


ONE_HEAD = Batch()


#: How a tensor in global memory is addressed.
INDEXING = {
    "token": "rows are tokens of a caller's tensor. Rows past a sequence's end load as zeros and are not stored",
    "slot": "one dense tile for each (chunk slot, value head)",
    "part": "one dense tile for each (part slot, value head)",
    "sequence": "one tile for each (sequence, value head): the state before the first chunk or after the last. In a grid over "
                "parts a load gives zeros unless the walk begins at chunk 0, and only the last part stores",
    "checkpoint": "one tile for each (checkpoint, value head). A store in a walk happens once every `checkpoint_chunks` whole "
                  "chunks. With `at`: after each chunk, where its numbers say",
    "number": "one integer for each sequence: the index of its tile in other tensors",
    "numbers": "one integer for each (sequence, chunk of its walk). The integers of a sequence are a row, whose length is known "
               "at run time",
    "block": "`slots` tiles for each core group: a channel between agents that share no memory",
    "counter": "one integer for all instances of a kernel: how many items they have claimed, or whether the first of two "
               "builds has declined the call",
    "places": "integers by which kernels over parts find their chunks: how many chunks a part has, how many parts there are, and "
              "for each part its sequence, its first chunk, and the sequence's first token and number of tokens",
    "const": "one tile that all instances read: a mask or table made on the host",
    "head": "one number for each value head, which only `scalar` reads, or one vector",
}

#: The fill of an output whose tiles of all chunk slots callers add up. Some slots have no chunk, and no kernel writes these.
ZEROED = "zeroed"


@dataclass(frozen=True)
class Tensor:
    """A tensor in global memory.

    role: "input", "output" or "workspace".
    index: a key of INDEXING.
    heads: "H" (query/key heads) or "HV" (value heads).
    dims: the dims of one tile.
    optional: whether the caller may leave the tensor out. Then loads give zeros, and stores have no effect.
    fill: for index "const", the rule for its content (see ir.interpret.const_tile). For index "head", what the host
    passes if the caller gives none; "" if the caller must give one. For index "slot", what rows past a sequence's end hold: ""
    zeros, "last" the last row again. ZEROED for an output with this index that callers add up: the host clears it first.
    slots: for index "block", the number of tiles of each core group. The iterations of a loop use them in rotation.
    strided: whether the caller gives the strides of batch, token and head at run time. The elements of a token's row are
    contiguous.
    at: the tensor of integers that says where the tiles of this one lie. The stride between tiles is known at run time.
    "sequence" at a "number": the tile of each sequence. At "numbers": the number of one chunk, the first or the one that the
    numbers' own `at` counts. "checkpoint" at "numbers": the tile after each chunk. At a "number": the row of each sequence, in
    which the tiles after its chunks follow one another. Nothing is stored where such a number is negative. "numbers" at a
    "number": how many chunks to count, from 1.
    over: the tensor whose memory this tensor shares.
    wide: for an input with several numbers for each token, whether it has the dtype of inputs with one number (float32 by
    default) and not that of q: a log decay, whose sums are exponents.
    least_step: of running sums with a tile for each chunk slot: a lower bound of the difference between a row and the row before.
    cleared: for an output of tokens, whether its kernel writes zeros to the rows that no sequence covers: rows past the end of
    the last sequence, and rows of skipped sequences. A parameter of the kernel (`clear_NAME`) turns this off, so that a caller's
    own buffer keeps its content there.
    setting: for an input of index "head", whether it is a setting of a call, by which no gradient is taken.
    """

    name: str
    role: str
    index: str
    heads: str
    dims: tuple[Dim, ...]
    dtype: str = "float32"
    optional: bool = False
    fill: str = ""
    slots: int = 1
    strided: bool = False
    at: str = ""
    over: str = ""
    wide: bool = False
    cleared: bool = False
    least_step: float = -math.inf
    setting: bool = False

    def __post_init__(self) -> None:
        if self.role not in ("input", "output", "workspace"):
            raise ValueError(f"tensor {self.name}: role {self.role!r} is not input, output or workspace")
        if self.index not in INDEXING:
            raise ValueError(f"tensor {self.name}: index {self.index!r} is not one of {', '.join(INDEXING)}")
        if self.heads not in ("H", "HV"):
            raise ValueError(f"tensor {self.name}: heads {self.heads!r} is not H or HV")

    @property
    def in_tiles(self) -> bool:
        """Whether memory has whole tiles, with their padding: of a workspace, or of a tensor with a tile for each chunk slot."""
        return self.role == "workspace" or self.index == "slot"

    @property
    def tile(self) -> Tile:
        """Dims and dtype of one tile."""
        return _tile(self.dims, self.dtype)

    def moved(self, heads: int = 0, transposed: bool = False, last: bool = False, one_token: bool = False,
              tokens: int = 0, piece: tuple[int, Dim] | None = None) -> Tile:
        """The type of what one load or store moves.

        By default this is the tile of one head, or its transpose if `transposed`. heads: for a tensor with one value for each
        token, the values of this number of value heads. Then a head is a column if the index is "token", else a row. last: only
        the last row of a tile, or the last entry of a vector. one_token: the row of a chunk's only token, without the axis of
        tokens. tokens: the rows of so many tokens, each a chunk. piece: (first, size) of the columns of each row, if not all.
        """
        if piece:
            return replace(self, dims=(*self.dims[:-1], piece[1])).moved(heads, transposed, last, one_token, tokens)
        if one_token:
            return _tile((*([tokens] if tokens else []), *self.dims[1:]), self.dtype)
        if last:
            return _tile(self.dims[1:], self.dtype)
        if not heads:
            return _tile(self.dims[::-1], self.dtype) if transposed else self.tile
        return _tile((*self.dims, heads) if self.index == "token" else (heads, *self.dims), self.dtype)


@lru_cache(maxsize=1024)
def _tile(dims: tuple[Dim, ...], dtype: str) -> Tile:
    """A tile's type. Kept, since `verify` asks for those of loads and stores after each pass."""
    return Tile(dims, dtype)


@dataclass(frozen=True)
class Buffer:
    """Storage that the pass `place` allocates for values: `slots` copies of `shape` elements in `space`, at byte `offset`.

    dims: the dims whose sizes `shape` lists. layout: "swizzled" (rows of 128 bytes, in the order that the module's helper
    functions use), "rows" (a fragment in which neighbouring threads hold equal parts of a row), "columns" (one in which a warp
    holds whole columns), "state_rows" (as "rows", of four threads), "along_rows" and "along_columns" (a vector beside such
    rows), or "" if the compiler chooses.
    pad: unused elements after each row, in a buffer with one row for each value head, and after the vector of each slot of a
    ring. own: for a barrier, whether it counts only the iterations of the walk's own part, without the warm-up.
    """

    name: str
    space: str
    shape: tuple[int, ...]
    dtype: str
    offset: int = 0
    slots: int = 1
    agent: str = ""
    dims: tuple[Dim, ...] = ()
    layout: str = ""
    pad: int = 0
    own: bool = False


@dataclass(frozen=True)
class Agent:
    """Consecutive threads of a block that run a branch of the kernel together. first: the number of the first thread. threads:
    how many threads. registers: for each thread. slots: of each ring that the agent fills. turns: how many equal groups of its
    threads take iterations in turn. Group t runs iterations t, t + turns and so on."""

    name: str
    first: int
    threads: int
    registers: int
    slots: int = 1
    turns: int = 1

    @property
    def of_iteration(self) -> int:
        """The threads that run an iteration."""
        return self.threads // self.turns
