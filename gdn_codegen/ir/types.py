"""Types of the IR: tiles with symbolic dims, and tensors in global memory."""
from __future__ import annotations

from dataclasses import dataclass

Dim = str | int
FLOATS = ("float16", "bfloat16", "float32", "float64")


@dataclass(frozen=True)
class Tile:
    """A tile value. `dims` mixes symbolic names ("C" tokens of a chunk, "K", "V") and 1; () is a scalar."""

    dims: tuple[Dim, ...] = ()
    dtype: str = "float32"

    def __post_init__(self) -> None:
        if self.dtype not in FLOATS:
            raise ValueError(f"tile dtype: got {self.dtype!r}, accepted are {', '.join(FLOATS)}")

    @property
    def rank(self) -> int:
        """0 for a number, 1 for a vector, 2 for a matrix."""
        return len(self.dims)

    def shape(self, sizes: dict[str, int]) -> tuple[int, ...]:
        """The extents, with each symbolic dim looked up in `sizes`."""
        return tuple(d if isinstance(d, int) else sizes[d] for d in self.dims)

    def with_dtype(self, dtype: str) -> Tile:
        """The same dims in another dtype."""
        return Tile(self.dims, dtype)

    @property
    def transposed(self) -> Tile:
        """The dims in reverse order."""
        return Tile(self.dims[::-1], self.dtype)

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.dims))}]"


#: How a tensor in global memory is addressed.
INDEXING = {
    "token": "rows are tokens of a caller's tensor; rows past a sequence's end load as zeros and are not stored",
    "slot": "one dense tile a (chunk slot, value head)",
    "part": "one dense tile a (part slot, value head)",
    "sequence": "one tile a (sequence, value head), of before its first chunk or after its last: in a grid over parts a load "
                "gives zeros where the walk does not begin at the first, and only the last part stores",
    "checkpoint": "one tile a (checkpoint, value head): a store in a walk happens after every so many whole chunks",
    "number": "one whole number a sequence, which says where tensors have its tile",
    "block": "`slots` tiles a core group: a channel between agents that share no memory",
    "const": "one tile, the same for all: a mask or table made on the host",
    "head": "one number a value head, which only `scalar` reads",
}


@dataclass(frozen=True)
class Tensor:
    """A tensor in global memory.

    role: "input", "output" or "workspace"; index: a key of INDEXING; heads: "H" (query/key heads) or "HV" (value
    heads); dims: the dims of one tile; optional: absent tensors load as zeros and are not stored.
    fill: for index "const", the rule that makes its content (see ir.ops.const_tile); for "head", the number that the host
    passes where the caller gives none, "" where one has to come.
    slots: for index "block", how many tiles the iterations of a loop take one after the other.
    strided: from batch to batch, token to token and head to head it is as far as the caller says at run time; a token's row is
    dense.
    at: for index "sequence", the tensor of index "number" that says which of the tensor's tiles are a sequence's; they lie a
    stride apart that is known at run time. over: the tensor in whose memory this one lies.
    cleared: for an output of tokens, whether the kernel that stores it puts zeros into rows that no sequence covers: those past
    the last sequence's end, and of sequences that are left out. A call says whether it does (`clear_NAME`): what lies in a
    caller's buffer stays.
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
    cleared: bool = False

    def __post_init__(self) -> None:
        if self.role not in ("input", "output", "workspace"):
            raise ValueError(f"tensor {self.name}: role {self.role!r} is not input, output or workspace")
        if self.index not in INDEXING:
            raise ValueError(f"tensor {self.name}: index {self.index!r} is not one of {', '.join(INDEXING)}")
        if self.heads not in ("H", "HV"):
            raise ValueError(f"tensor {self.name}: heads {self.heads!r} is not H or HV")

    @property
    def tile(self) -> Tile:
        """Dims and dtype of one tile."""
        return Tile(self.dims, self.dtype)

    def moved(self, heads: int = 0, transposed: bool = False, last: bool = False) -> Tile:
        """What one load or store moves: a head's tile, or its transpose; or, of a tensor of one value a token, those of
        `heads` value heads, a column a head where rows are tokens, else a row a head; or only its `last` row, a number."""
        if last:
            return Tile((), self.dtype)
        if not heads:
            return self.tile.transposed if transposed else self.tile
        return Tile((*self.dims, heads) if self.index == "token" else (heads, *self.dims), self.dtype)
