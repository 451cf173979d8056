"""The table of all ops: name, type rule, meaning in torch, effect.

Ops do not depend on a target. The error of a type rule tells how to fix the input. The meaning of an op is
`evaluate(attrs, *values)` on torch tensors with the shape of the tiles. Loads, stores and waits depend on the instance that runs
them, so `ir/interpret.py` has their meaning.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from . import decompositions, texts, vjps, zeros
from .texts import TextRule
from .types import FLOATS, Tile
from .zeros import ZeroRule

if TYPE_CHECKING:  # `evaluate` functions import torch when they run, so that builds and `--help` need not import it
    import torch

    from .body import Body
    from .core import Op
    from .reverse import Reverse

Attrs = dict[str, Any]
#: (attributes of an op) -> the axes over which it sums, as pairs (operand, axis). The axes of a product are summed together.
Sums = Callable[[Attrs], "tuple[tuple[int, int], ...]"]
Vjp = Callable[["Reverse", "Op", str], None]


class TypeRuleError(ValueError):
    """The operands of an op do not satisfy its type rule."""


@dataclass(frozen=True, eq=False)
class OpDef:
    """An op: its name, its meaning in one line, and the properties that passes use.

    infer: (attrs, *types of operands) -> type of the result. It raises TypeRuleError.
    evaluate: (attrs, *operands) -> the result in torch. None if ir/interpret.py has the meaning.
    effect: "pure", "read", "write" or "sync".
    elementwise: whether an entry of the result depends only on the same entries of the operands.
    attrs: the names of its attributes.
    zero: the rule for the axes along which the result is zero on padding (ir/zeros.py).
    decompose: (op, body) -> the name of the result, which the function makes of other ops. None if emitters have a rule for the
    op, or a separate pass removes it.
    text: (op, texts of operands) -> an expression in torch, for the reference that generated modules check their kernels
    against (ir/texts.py). Operands may have leading dims. None if no page may use the op.
    vjp: the derivative: (r, op, cotangent of the result) gives each operand its cotangent (ir/vjps.py). None if no page may use
    the op, or if it has no derivative.
    sums: the axes over which the op sums. An operand has to be zero on their padding. None if it sums nothing.
    view: who needs no storage for the result, as each reader makes it of the operands: the "threads" of a block, "cores".
    number: whether the result is a number that does not depend on operands, agents and iterations.
    entry: whether the result is an entry of the operand, a vector, or a row of it, a tile. Cores and warp groups read the entry
    from the operand's storage when the op runs. It needs no storage of its own.
    across_rows: whether a row of the result depends on other rows of a tile, so that the tile has to be in memory that all
    threads of an agent read.
    loaded: the attribute with which a load reads only the result, of a vector in a workspace or a tile in a channel. "" if there
    is none.
    """

    name: str
    doc: str
    infer: Callable[..., Tile]
    evaluate: Callable[..., torch.Tensor] | None = None
    effect: str = "pure"
    elementwise: bool = False
    attrs: tuple[str, ...] = ()
    zero: ZeroRule = zeros.nowhere
    decompose: Callable[[Op, Body], str] | None = None
    text: TextRule | None = None
    vjp: Vjp | None = None
    sums: Sums | None = None
    view: tuple[str, ...] = ()
    number: bool = False
    entry: bool = False
    loaded: str = ""
    across_rows: bool = False


OPS: dict[str, OpDef] = {}
#: Attribute of any op: the op works on the chunk this number of iterations later. It has no effect if there is no such chunk.
AHEAD = "ahead"
#: Attribute of any op: the op has no effect in the iterations of the warm-up.
OWN_PART = "own_part"
#: Attribute of a signal or fence: the op of an iteration runs in the next iteration of its loop, that of the last one after it.
LATE = "late"
#: Attribute of any op: the op is one of this number of consecutive ops that one statement runs in parallel.
BESIDE = "beside"
#: Attribute of any op: how the entries of the tile are assigned to threads. "sums": as in the result of a warp group's product.
#: "warp_sums": the same for the product of one warp. "copy": as the compiler chooses for a copy from one buffer to another.
ORDER = "order"
#: Attribute of any op: the op computes this number of columns at a time, together with its neighbours that have the attribute.
BY_COLUMNS = "by_columns"
#: Attribute of `maximum` and `minimum`: the number of the operand that is a constant. NaN of the other operand must be kept.
BOUND = "bound"
#: Ops that make one entry of each row of a tile, or a number of a vector.
OF_ROWS = ("row_sum", "row_max")
#: The attributes that any op may have.
ANY_OP = (AHEAD, OWN_PART, BESIDE, ORDER, BY_COLUMNS)


def op(name: str, doc: str, infer: Callable[..., Tile], evaluate: Callable[..., torch.Tensor] | None = None, *,
       effect: str = "pure", elementwise: bool = False, attrs: tuple[str, ...] = (), zero: ZeroRule = zeros.nowhere,
       decompose: Callable[[Op, Body], str] | None = None, text: TextRule | None = None, vjp: Vjp | None = None,
       sums: Sums | None = None, view: tuple[str, ...] = (), number: bool = False, entry: bool = False, loaded: str = "",
       across_rows: bool = False) -> None:
    """Add an op to the table. Other packages may call it, too. The arguments are the fields of OpDef. ValueError if the name is
    taken."""
    if name in OPS:
        raise ValueError(f"name: got {name!r}, an op that is in the table; accepted: a name that is not")
    OPS[name] = OpDef(name, doc, infer, evaluate, effect, elementwise, attrs, zero, decompose, text, vjp, sums, view, number,
                      entry, loaded, across_rows)


def infer(kind: str, args: tuple[Tile, ...], attrs: tuple[tuple[str, Any], ...] = ()) -> Tile:
    """The type of the result of `kind` for operands of types `args`. TypeRuleError for an unknown op or attribute, or a
    mismatch."""
    if kind not in OPS:
        raise TypeRuleError(f"op {kind!r} is unknown; the table ir/ops.py has {', '.join(OPS)}")
    return _typed(OPS[kind], args, attrs)


@lru_cache(maxsize=4096)
def _typed(d: OpDef, args: tuple[Tile, ...], attrs: tuple[tuple[str, Any], ...]) -> Tile:
    """The type that the rule of an op gives. `verify` asks for the same few after each pass."""
    extra = [n for n, _ in attrs if n not in d.attrs and n not in ANY_OP]
    if extra:
        raise TypeRuleError(f"{d.name}: attribute {', '.join(sorted(extra))} is unknown; it takes {', '.join(d.attrs) or 'none'}")
    return d.infer(dict(attrs), *args)


# --- type rules ------------------------------------------------------------------------------------------------------
def _need(cond: bool, text: Callable[[], str]) -> None:
    """TypeRuleError with this text, which is made only then: rules run for each op after each pass."""
    if not cond:
        raise TypeRuleError(text())


def _arity(kind: str, n: int, args: tuple[Tile, ...]) -> None:
    _need(len(args) == n, lambda: f"{kind} takes {n} operand{'' if n == 1 else 's'}; got {len(args)}")


def _broadcast(kind: str) -> Callable[..., Tile]:
    """The type rule of an elementwise op with two operands. Dims of size 1 are broadcast. The TypeRuleError tells how to fix
    it."""
    def rule(attrs: Attrs, *args: Tile) -> Tile:
        """The type of the result. Accepts two tiles of the same rank and dtype, or a tile and a number of the same dtype."""
        _arity(kind, 2, args)
        a, b = args
        _need(a.dtype == b.dtype, lambda: f"{kind}: operands have dtypes {a.dtype} and {b.dtype}; cast one of them")
        if not a.dims or not b.dims:
            return a if a.dims else b
        _need(a.rank == b.rank, lambda: f"{kind}: shapes {a} and {b} have different ranks; write x[:, None] or x[None, :]")
        out = []
        for x, y in zip(a.dims, b.dims, strict=True):
            _need(x == y or 1 in (x, y), lambda: f"{kind}: dims {x} and {y} of {a} and {b} do not match")
            out.append(y if x == 1 else x)
        return Tile(tuple(out), a.dtype)
    return rule


def _same(kind: str) -> Callable[..., Tile]:
    def rule(attrs: Attrs, *args: Tile) -> Tile:
        _arity(kind, 1, args)
        return args[0]
    return rule


def _square(kind: str) -> Callable[..., Tile]:
    def rule(attrs: Attrs, *args: Tile) -> Tile:
        _arity(kind, 1, args)
        x = args[0]
        _need(x.rank == 2 and x.dims[0] == x.dims[1], lambda: f"{kind} takes a square tile; got {x}")
        return x
    return rule


def _matmul(attrs: Attrs, *args: Tile) -> Tile:
    """[m, k] @ [k, n] of the same dtype -> [m, n] in float32, or in float64 for float64 operands.

    The optional third operand is an accumulator, which must have the type of the result.
    """
    _need(len(args) in (2, 3), lambda: f"matmul takes two operands and an optional accumulator; got {len(args)}")
    a, b = args[:2]
    _need(a.rank == 2 and b.rank == 2, lambda: f"matmul takes two tiles of rank 2; got {a} and {b}")
    _need(a.dtype == b.dtype, lambda: f"matmul: operands have dtypes {a.dtype} and {b.dtype}; cast one of them")
    m, k = a.dims[::-1] if attrs.get("ta") else a.dims
    k2, n = b.dims[::-1] if attrs.get("tb") else b.dims
    if attrs.get("stacked"):
        _need(a == b and isinstance(k, int) and not attrs.get("ta") and not attrs.get("tb"),
              lambda: f"matmul: stacked operands are stacks of one type, not transposed; got {a} and {b}")
        k2 = k
    _need(k == k2, lambda: f"matmul: contracted dims {k} and {k2} of {a} and {b} differ; transpose one operand with .T")
    out = Tile((m, n), "float64" if a.dtype == "float64" else "float32")
    _need(len(args) == 2 or args[2] == out, lambda: f"matmul: accumulator {args[-1]} is not {out}")
    return out


def _stack(kind: str) -> Callable[..., Tile]:
    def rule(attrs: Attrs, *args: Tile) -> Tile:
        """Accepts a square tile, or square blocks one below the other."""
        stack = len(args) == 1 and args[0].rank == 2 and isinstance(args[0].dims[1], int)
        return args[0] if stack else _square(kind)(attrs, *args)
    return rule


def _transpose(attrs: Attrs, *args: Tile) -> Tile:
    _arity("transpose", 1, args)
    _need(args[0].rank == 2, lambda: f"transpose takes a tile of rank 2; got {args[0]}")
    return args[0].transposed


def _col(attrs: Attrs, *args: Tile) -> Tile:
    _arity("col", 1, args)
    _need(args[0].rank == 1, lambda: f"x[:, None] takes a vector; got {args[0]}")
    return Tile((args[0].dims[0], 1), args[0].dtype)


def _row(attrs: Attrs, *args: Tile) -> Tile:
    _arity("row", 1, args)
    _need(args[0].rank == 1, lambda: f"x[None, :] takes a vector; got {args[0]}")
    return Tile((1, args[0].dims[0]), args[0].dtype)


def _cumsum(attrs: Attrs, *args: Tile) -> Tile:
    _arity("cumsum", 1, args)
    _need(args[0].rank >= 1, lambda: "cumsum takes a tile with a row for each token; got a number")
    _need(args[0].rank == 2 or not attrs.get("by_head"), lambda: f"cumsum: by_head takes a column for each head; got {args[0]}")
    return args[0].transposed if attrs.get("by_head") else args[0]


def _drop_first(attrs: Attrs, *args: Tile) -> Tile:
    _arity("last", 1, args)
    _need(args[0].rank >= 1, lambda: "last takes a tile with rows; got a number")
    return Tile(args[0].dims[1:], args[0].dtype)


def _sums_of_rows(kind: str) -> Callable[..., Tile]:
    def rule(attrs: Attrs, *args: Tile) -> Tile:
        _need(len(args) - bool(attrs.get("given")) in (1, 2),
              lambda: f"{kind} takes sums, and perhaps sums before each token; got {len(args)} operands")
        _need(args[0].rank == 2 and args[0] == args[-1],
              lambda: f"{kind} takes tiles of rank 2 and one type; got {', '.join(map(str, args))}")
        return args[0]
    return rule


def _alike(kind: str) -> Callable[..., Tile]:
    def rule(attrs: Attrs, *args: Tile) -> Tile:
        _arity(kind, 2, args)
        _need(args[0].rank == 2 and args[0] == args[1],
              lambda: f"{kind} takes two tiles of one type; got {args[0]} and {args[1]}")
        return args[0]
    return rule


def _decayed_product(attrs: Attrs, *args: Tile) -> Tile:
    """Two tiles [m, k], and sums of log decays [m, k] of one type -> [m, m]."""
    _need(len(args) in (3, 4),
          lambda: f"decayed_product takes two tiles, sums, and perhaps sums before each token; got {len(args)} operands")
    a = args[0]
    _need(a.rank == 2 and set(args) == {a},
          lambda: f"decayed_product takes tiles of one shape and dtype; got {', '.join(map(str, args))}")
    return Tile((a.dims[0], a.dims[0]), a.dtype)


def _decayed_pairs_type(attrs: Attrs, *args: Tile) -> Tile:
    """Two tiles [m, k] of one dtype, and sums of log decays [m, k] -> [m, m], of the sums' dtype."""
    _need(len(args) in (3, 4),
          lambda: f"decayed_pairs takes two tiles, sums, and perhaps sums before each token; got {len(args)} operands")
    a, b, x, *before = args
    _need(a == b and a.rank == 2 and x.dims == a.dims and all(y == x for y in before),
          lambda: f"decayed_pairs takes two tiles of one dtype, and sums; got {', '.join(map(str, args))}")
    return Tile((a.dims[0], a.dims[0]), x.dtype)


def _decayed_matmul_type(attrs: Attrs, *args: Tile) -> Tile:
    """A square tile [m, m], a tile [m, k], and sums of log decays [m, k] of the tile's type -> [m, k]."""
    _need(len(args) in (3, 4),
          lambda: f"decayed_matmul takes two tiles, sums, and perhaps sums before each token; got {len(args)} operands")
    p, a = args[:2]
    _need(a.rank == 2 and set(args[1:]) == {a} and p == Tile((a.dims[0], a.dims[0]), a.dtype),
          lambda: f"decayed_matmul takes a square tile, and tiles of one shape and dtype; got {', '.join(map(str, args))}")
    return a


def _decayed_blocks_type(attrs: Attrs, *args: Tile) -> Tile:
    """A square tile [m, m] and a tile [m, k] of one dtype, and sums of log decays [m, k] -> [m, k], of the sums' dtype."""
    _need(len(args) - bool(attrs.get("given")) in (3, 4),
          lambda: "decayed_blocks takes two tiles, sums, perhaps sums before each token, and middle rows if they are given; got "
                  f"{len(args)} operands")
    p, a, x, *more = args
    _need(a.rank == 2 and x.dims == a.dims and all(y == x for y in more) and p == Tile((a.dims[0], a.dims[0]), a.dtype),
          lambda: f"decayed_blocks takes a square tile, a tile of its dtype, and sums; got {', '.join(map(str, args))}")
    return x


def _delayed(attrs: Attrs, *args: Tile) -> Tile:
    _need(len(args) > 1, lambda: f"delay takes a tile, and a row for each token of the delay; got {len(args)} operand(s)")
    x = args[0]
    _need(x.rank == 2 and all(r == Tile(x.dims[1:], x.dtype) for r in args[1:]),
          lambda: "delay takes a tile with a row for each token, and rows of its width and dtype; got "
                  f"{', '.join(map(str, args))}")
    return x


def _of_token(attrs: Attrs, *args: Tile) -> Tile:
    _arity("of_token", 1, args)
    _need(args[0].rank > 0 and isinstance(args[0].dims[0], int),
          lambda: f"of_token takes a tile with a row for each token of a group; got {args[0]}")
    return Tile(args[0].dims[1:], args[0].dtype)


def _row_sum(attrs: Attrs, *args: Tile) -> Tile:
    _arity("row_sum", 1, args)
    _need(args[0].rank > 0, lambda: f"row_sum takes a tile of rank 1 or 2; got {args[0]}")
    return Tile(args[0].dims[:-1], args[0].dtype)


def _row_max(attrs: Attrs, *args: Tile) -> Tile:
    _arity("row_max", 1, args)
    _need(args[0].rank > 0, lambda: f"row_max takes a tile of rank 1 or 2; got {args[0]}")
    return Tile(args[0].dims[:-1], args[0].dtype)


def _column_sum(attrs: Attrs, *args: Tile) -> Tile:
    _arity("column_sum", 1, args)
    _need(args[0].rank == 2, lambda: f"column_sum takes a tile of rank 2; got {args[0]}")
    return Tile((*([attrs["parts"]] if attrs.get("parts") else []), args[0].dims[1]), args[0].dtype)


def _diagonal(attrs: Attrs, *args: Tile) -> Tile:
    return Tile((_square("diagonal")(attrs, *args).dims[0],), args[0].dtype)


def _inverted(attrs: Attrs, *args: Tile) -> Tile:
    x = _square("diag_inverse")(attrs, *args[:1])
    _need(len(args) == 1 or [y.dims for y in args[1:]] == [x.dims[:1]],
          lambda: f"diag_inverse scales columns by one vector of {x.dims[:1]}; got {', '.join(map(str, args[1:]))}")
    return x


def _matrix(kind: str) -> Callable[..., Tile]:
    def rule(attrs: Attrs, *args: Tile) -> Tile:
        _arity(kind, 1, args)
        _need(args[0].rank == 2, lambda: f"{kind} takes a tile of rank 2; got {args[0]}")
        return args[0]
    return rule


def _cast(attrs: Attrs, *args: Tile) -> Tile:
    _arity("cast", 1, args)
    _need(attrs.get("to") in FLOATS, lambda: f"cast: to={attrs.get('to')!r} is not one of {', '.join(FLOATS)}")
    return args[0].with_dtype(attrs["to"])


def _scalar(attrs: Attrs, *args: Tile) -> Tile:
    _arity("scalar", 0, args)
    return Tile((), attrs.get("dtype", "float32"))


def _filled(attrs: Attrs, *args: Tile) -> Tile:
    _arity("full", 0, args)
    return Tile(tuple(attrs["dims"]), attrs.get("dtype", "float32"))


def _expand(attrs: Attrs, *args: Tile) -> Tile:
    _arity("expand", 1, args)
    want = Tile(tuple(attrs["dims"]), args[0].dtype)
    _need(args[0].rank in (0, want.rank) and all(x in (1, y) for x, y in zip(args[0].dims, want.dims, strict=False)),
          lambda: f"expand: {args[0]} does not broadcast to {want}")
    return want


def _segment(attrs: Attrs, *args: Tile) -> Tile:
    _arity("segment", 1, args)
    _need(args[0].rank == 1, lambda: f"segment takes a vector; got {args[0]}")
    return Tile((attrs["size"],), args[0].dtype)


def _join(attrs: Attrs, *args: Tile) -> Tile:
    _need(bool(args) and all(x.rank == 1 and x.dtype == args[0].dtype for x in args), lambda: "join takes vectors of one dtype")
    return Tile((attrs["dim"],), args[0].dtype)


def _block(attrs: Attrs, *args: Tile) -> Tile:
    _arity("block", 1, args)
    _need(args[0].rank == 2, lambda: f"block takes a tile of rank 2; got {args[0]}")
    return Tile((attrs["size"], attrs["size"]), args[0].dtype)


def _blocks(attrs: Attrs, *args: Tile) -> Tile:
    _arity("blocks", 1, args)
    _need(args[0].rank == 2, lambda: f"blocks takes a tile of rank 2; got {args[0]}")
    return Tile((attrs["size"] * len(attrs["at"]), attrs["size"]), args[0].dtype)


def _diagonal_stack(attrs: Attrs, *args: Tile) -> Tile:
    x = _square("diagonal_stack")(attrs, *args)
    return Tile((x.dims[0], attrs["size"]), "float64" if x.dtype == "float64" else "float32")


def _insert(attrs: Attrs, *args: Tile) -> Tile:
    _arity("insert", 2, args)
    x, y = args
    _need(x.rank == 2 and y.rank == 2 and isinstance(y.dims[1], int),
          lambda: f"insert takes a tile and square blocks, one below the other; got {x} and {y}")
    return x


def _add_rows(attrs: Attrs, *args: Tile) -> Tile:
    x = _matrix("add_rows")(attrs, *args)
    to, of, width, count, step = (attrs[n] for n in ("to", "of", "width", "count", "step"))
    starts = range(0, count * step, step)
    written = [s + to + i for s in starts for i in range(width)]
    _need(len({*written, *(s + of for s in starts)}) == (width + 1) * count,
          lambda: f"add_rows reads rows that it writes, or writes one twice; got {dict(attrs)}")
    return x


def _from_quarters(attrs: Attrs, *args: Tile) -> Tile:
    _arity("from_quarters", 4, args)
    _need(len(set(args)) == 1 and args[0].rank == 2,
          lambda: f"from_quarters takes four tiles of one type; got {', '.join(map(str, args))}")
    return Tile(tuple(attrs["dims"]), args[0].dtype)


def _effect(attrs: Attrs, *args: Tile) -> Tile:
    return Tile(())


def _resumed(attrs: Attrs, *args: Tile) -> Tile:
    _arity("resume", 2, args)
    _need(args[0].dims == args[1].dims, lambda: f"resume takes two states of one shape; got {args[0]} and {args[1]}")
    return args[0]


def _loaded(attrs: Attrs, *args: Tile) -> Tile:
    raise TypeRuleError("load has no type rule: its type is that of the tensor that it names")


def _takes_a_number(attrs: Attrs, *args: Tile) -> Tile:
    _need(len(args) == 1 and not args[0].dims, lambda: f"the op takes a number; got {', '.join(map(str, args)) or 'nothing'}")
    return Tile(())


def _if_negative(attrs: Attrs, *args: Tile) -> Tile:
    _need(len(args) == 2 and not args[0].dims, lambda: f"if_negative takes a number and a tile; got {', '.join(map(str, args))}")
    return args[1]


# --- meanings --------------------------------------------------------------------------------------------------------
def ranges(n: int, device: torch.device | str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    """The row indices, [n, 1], and the column indices, [1, n]."""
    import torch
    x = torch.arange(n, device=device)
    return x[:, None], x[None, :]


@lru_cache(maxsize=256)
def keep(kind: str, n: int, size: int = 0, device: torch.device | str = "cpu") -> torch.Tensor:
    """A boolean mask, [n, n]: the entries that a masking op keeps. One tensor for all callers, which only read it."""
    i, j = ranges(n, device)
    return {"lower": i >= j, "strictly_lower": i > j, "eye": i == j, "diagonal_blocks": i // max(1, size) == j // max(1, size),
            "pairs": (i // max(1, 2 * size) == j // max(1, 2 * size)) & (i // max(1, size) > j // max(1, size)),
            "both_pairs": (i // max(1, 2 * size) == j // max(1, 2 * size)) & (i // max(1, size) != j // max(1, size))}[kind]


def _masked(kind: str) -> Callable[..., torch.Tensor]:
    def meaning(attrs: Attrs, x: torch.Tensor) -> torch.Tensor:
        import torch
        name = f"both_{kind}" if attrs.get("both") else kind
        kept = keep(name, x.shape[1], attrs.get("size", 0), x.device)
        return torch.where(kept if len(x) == x.shape[1] else kept.repeat(len(x) // x.shape[1], 1), x, attrs.get("fill", 0.0))
    return meaning


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x if x.element_size() == 8 else x.float()


def _mm(attrs: Attrs, a: torch.Tensor, b: torch.Tensor, acc: torch.Tensor | None = None) -> torch.Tensor:
    a, b = _wide(a), _wide(b)
    if attrs.get("stacked"):
        y = (_apart(a) @ _apart(b)).flatten(0, 1)
        return y if acc is None else acc + y
    y = (a.T if attrs.get("ta") else a) @ (b.T if attrs.get("tb") else b)
    return y if acc is None else acc + y


def _apart(x: torch.Tensor) -> torch.Tensor:
    """The square blocks of a stack, [n, size, size]."""
    return x.reshape(-1, x.shape[1], x.shape[1])


def _blocks_of(attrs: Attrs, x: torch.Tensor) -> torch.Tensor:
    import torch
    size = attrs["size"]
    return torch.cat([x[i:i + size, j:j + size] for i, j in attrs["at"]])


def _diagonal_blocks_of(attrs: Attrs, x: torch.Tensor) -> torch.Tensor:
    return _wide(_blocks_of({"size": attrs["size"], "at": [(i, i) for i in range(0, len(x), attrs["size"])]}, x))


def _inserted(attrs: Attrs, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    out, size = x.clone(), y.shape[1]
    for (i, j), block in zip(attrs["at"], _apart(y), strict=True):
        out[i:i + size, j:j + size] = block.to(x.dtype)
    return out


def _inverse(attrs: Attrs, a: torch.Tensor) -> torch.Tensor:
    import torch
    eye = torch.eye(len(a), dtype=a.dtype)
    out: torch.Tensor = torch.linalg.solve_triangular(eye + a, eye, upper=False, unitriangular=True)
    return out


def _diag_inverse(attrs: Attrs, a: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
    wide = _wide(a)
    out = wide.new_zeros(wide.shape)
    for at in range(0, len(a), attrs["size"]):
        here = slice(at, at + attrs["size"])
        out[here, here] = _inverse(attrs, wide[here, here])
    out = out.tril(-1) if attrs.get("strict") else out
    return (out if scale is None else out * scale).to(a.dtype)


def _row_norm(attrs: Attrs, x: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = x * ((x * x).sum(-1, keepdim=True) + attrs.get("eps", 1e-6)).rsqrt()
    return out


def _of_torch(name: str) -> Callable[..., torch.Tensor]:
    """The torch function with this name, as the meaning of an op."""
    def meaning(attrs: Attrs, *x: torch.Tensor) -> torch.Tensor:
        import torch
        out: torch.Tensor = getattr(torch, name)(*x)
        return out
    return meaning


def _softplus(attrs: Attrs, x: torch.Tensor) -> torch.Tensor:
    return x.logaddexp(x.new_zeros(()))


def _joined(attrs: Attrs, *x: torch.Tensor) -> torch.Tensor:
    import torch
    return torch.cat(x)


def _rows_added(attrs: Attrs, x: torch.Tensor) -> torch.Tensor:
    to, of, width, count, step = (attrs[n] for n in ("to", "of", "width", "count", "step"))
    import torch
    places = [(s + i, s) for s in range(0, count * step, step) for i in range(width)]
    return x.index_add(0, torch.tensor([to + i for i, _ in places]), x[[of + s for _, s in places]])


def _of_four(attrs: Attrs, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, d: torch.Tensor) -> torch.Tensor:
    import torch
    return torch.cat([torch.cat([a, b], 1), torch.cat([c, d], 1)])


def _sums(attrs: Attrs, x: torch.Tensor) -> torch.Tensor:
    x = x.clamp(min=attrs["least"]) if "least" in attrs else x
    if attrs.get("by_head"):
        return x.cumsum(0).T
    return x.cumsum(0) - x if attrs.get("exclusive") else x.cumsum(0)


def _delay(attrs: Attrs, x: torch.Tensor, *before: torch.Tensor) -> torch.Tensor:
    import torch
    return torch.cat([torch.stack(before), x])[:len(x)]


def _advance(attrs: Attrs, x: torch.Tensor) -> torch.Tensor:
    import torch
    return torch.cat([x[attrs["by"]:], torch.zeros_like(x[:attrs["by"]])])


def _middle(x: torch.Tensor, size: int) -> torch.Tensor:
    """For each row of x, the last row of the first half of its 2 size rows."""
    import torch
    return x[torch.arange(len(x)) // (2 * size) * (2 * size) + size - 1]


def _to_middle(attrs: Attrs, x: torch.Tensor, *more: torch.Tensor) -> torch.Tensor:
    import torch
    size, (later, middle) = attrs["size"], _later(attrs, x, *more)
    return torch.where((torch.arange(len(x)) // size % 2 == 1)[:, None], later - middle, middle - x)


def _halves(attrs: Attrs, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    import torch
    return torch.where((torch.arange(len(a)) // attrs["size"] % 2 == 1)[:, None], b, a)


def _from_middle(attrs: Attrs, x: torch.Tensor, *more: torch.Tensor) -> torch.Tensor:
    later, middle = _later(attrs, x, *more)
    return later - middle


def _later(attrs: Attrs, x: torch.Tensor, *more: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What rows after the middle one read, and the middle row of each row."""
    before, middle = (more[:-1], more[-1]) if attrs.get("given") else (more, _middle(x, attrs["size"]))
    return (before or (x,))[0], middle


def _decayed(attrs: Attrs, a: torch.Tensor, b: torch.Tensor, x: torch.Tensor, before: torch.Tensor | None = None) -> torch.Tensor:
    kept = keep("lower" if before is None else "strictly_lower", len(x), 0, x.device)[..., None]
    decay = ((x if before is None else before)[:, None] - x[None]).where(kept, x.new_tensor(-float("inf"))).exp()
    return (a[:, None] * b[None] * decay).sum(-1)


def _decayed_matmul(attrs: Attrs, p: torch.Tensor, b: torch.Tensor, x: torch.Tensor,
                    before: torch.Tensor | None = None) -> torch.Tensor:
    kept = keep("strictly_lower", len(x), 0, x.device)[..., None]
    decay = ((x if before is None else before)[:, None] - x[None]).where(kept, x.new_tensor(-float("inf"))).exp()
    each = p[..., None] * decay * (b[:, None] if attrs.get("transposed") else b[None])
    return each.sum(0 if attrs.get("transposed") else 1)


def _decayed_blocks(attrs: Attrs, p: torch.Tensor, b: torch.Tensor, x: torch.Tensor, *more: torch.Tensor) -> torch.Tensor:
    """NaN where kernels would read what they should not: entries on or above the diagonal, and wrong middle rows."""
    kept = keep("diagonal_blocks", len(x), attrs["size"], x.device)
    entries = p.to(x.dtype).where(kept, p.new_zeros(()))
    if entries.triu().any():  # kernels read whole blocks
        entries = entries + float("nan")
    before = more[:len(more) - bool(attrs.get("given"))]
    if attrs.get("given") and not more[-1].equal(_middle(x, attrs["size"] // 2)):
        entries = entries + float("nan")
    return _decayed_matmul(attrs, entries, b.to(x.dtype), x, *before)


def _kept_if_negative(attrs: Attrs, number: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return x if number < 0 else x.new_zeros(x.shape)


# --- the table -------------------------------------------------------------------------------------------------------
ALL_AGENTS = ("threads", "cores")
_CALLS = {"softplus": texts.softplus, "neg": lambda o, x: f"-{x[0]}"}
_INFIX = {"add": "+", "sub": "-", "mul": "*", "div": "/"}

op("const", "a literal number", lambda attrs: Tile(()), attrs=("value",), text=texts.const, view=ALL_AGENTS, number=True)
op("scalar", "a number from the caller: the parameter `param`, or the entry of `tensor`, of dtype `dtype`, for the value "
   "head", _scalar,
   attrs=("param", "tensor", "dtype", "head"), view=ALL_AGENTS, number=True)
op("full", "a tile in which every entry is `value`", _filled, attrs=("dims", "value", "dtype"), zero=zeros.full, text=texts.full,
   view=("threads",))
for _n in ("add", "sub", "mul", "div", "maximum", "minimum"):
    op(_n, f"elementwise {_n}, with row, column and scalar broadcast", _broadcast(_n), _of_torch(_n), elementwise=True,
       attrs=(BOUND,) if _n in ("maximum", "minimum") else (), vjp=getattr(vjps, _n),
       zero={"mul": zeros.any_operand, "div": zeros.quotient}.get(_n, zeros.all_operands),
       text=texts.infix(_INFIX[_n]) if _n in _INFIX else texts.call(f"torch.{_n}"))
op("rounded", "as an operand of a product has it, where those have fewer bits: a value of float32", _same("rounded"),
   lambda attrs, x: x, elementwise=True, zero=zeros.same, text=lambda o, x: x[0])
op("boundary", "the identity. Passes before `cut` do not combine x with what reads it, so that a kernel can store it for others. "
   "`back`: x is a cotangent. `wide`: kernels store it in float32 where operands have fewer bits", _same("boundary"),
   lambda attrs, x: x, elementwise=True, attrs=("back", "wide"), zero=zeros.same, text=lambda o, x: x[0], vjp=vjps.boundary)
for _n in ("neg", "exp", "log", "rsqrt", "sigmoid", "softplus"):
    op(_n, f"elementwise {_n}", _same(_n), _softplus if _n == "softplus" else _of_torch(_n), elementwise=True,
       zero=zeros.same if _n == "neg" else zeros.nowhere, vjp=getattr(vjps, _n),
       decompose=decompositions.softplus if _n == "softplus" else None, text=_CALLS.get(_n, texts.call(f"torch.{_n}")))
op("cast", "rounding to another dtype", _cast, elementwise=True, attrs=("to",), zero=zeros.same, text=texts.after(""),
   vjp=vjps.cast)
op("col", "a vector as a column, [C, 1]", _col, lambda attrs, x: x[:, None], elementwise=True, zero=zeros.same,
   text=texts.after("[..., :, None]"), view=ALL_AGENTS, vjp=vjps.col)
op("row", "a vector as a row, [1, C]", _row, lambda attrs, x: x[None, :], elementwise=True, zero=zeros.transposed,
   text=texts.after("[..., None, :]"), view=ALL_AGENTS, vjp=vjps.row)
op("expand", "broadcast to a full tile", _expand, elementwise=True, attrs=("dims",), zero=zeros.all_operands, text=texts.expand,
   view=("threads",), vjp=vjps.expand)
op("matmul", "a @ b (+ accumulator), summed in float32. `ta`, `tb`: a or b is transposed. `asynchronous`: the op only starts "
   "the product, which is complete after the agent's next drain; another one may add to it where its sums are. `absent`: the "
   "product is zero in a walk's first iteration if this tensor is not given. `stacked`: a and b are square blocks, one below the "
   "other; each block of a is multiplied by that of b",
   _matmul, _mm, attrs=("ta", "tb", "asynchronous", "absent", "stacked"), zero=zeros.product, text=texts.matmul,
   sums=lambda attrs: () if attrs.get("stacked") else ((0, int(not attrs.get("ta"))), (1, int(bool(attrs.get("tb"))))),
   vjp=vjps.matmul)
op("cumsum", "running sum along tokens. Terms below `least` are replaced by `least`; NaN is kept. `exclusive`: without the token "
   "itself. `clamp_decay` computes this of a vector as a difference. `by_head`: of a tile with a column for each head, as rows",
   _cumsum, _sums, attrs=("least", "exclusive", "by_head"), zero=zeros.running_sums, text=texts.cumsum,
   sums=lambda attrs: ((0, 0),), across_rows=True, vjp=vjps.cumsum)
op("segment", "`size` entries of a vector, beginning at `start`", _segment, lambda attrs, x: x[attrs["start"]:][: attrs["size"]],
   attrs=("start", "size"), view=ALL_AGENTS)
op("join", "the concatenation of vectors, with dim `dim`", _join, _joined, attrs=("dim",))
op("block", "a size x size block of a tile, beginning at `row` and `col`", _block,
   lambda attrs, x: x[attrs["row"]:, attrs["col"]:][:attrs["size"], :attrs["size"]], attrs=("row", "col", "size"),
   view=ALL_AGENTS)
op("blocks", "size x size blocks of a tile, which begin at the rows and columns `at`, one below the other", _blocks,
   _blocks_of, attrs=("at", "size"), view=ALL_AGENTS)
op("diagonal_stack", "the size x size blocks on the diagonal, one below the other, in float32", _diagonal_stack,
   _diagonal_blocks_of, attrs=("size",), zero=zeros.stacked)
op("insert", "the tile with square blocks, rounded to its dtype, in the places that begin at the rows and columns `at`. The "
   "blocks lie one below the other", _insert, _inserted, attrs=("at",))
op("add_rows", "the tile with its row `of` added to each of `width` rows from `to` on. So in `count` places, each `step` rows "
   "after the one before. No row is both read and written", _add_rows, _rows_added, attrs=("to", "of", "width", "count", "step"),
   zero=zeros.running_sums)
op("from_quarters", "a tile made of its four quarters: upper left, upper right, lower left, lower right", _from_quarters,
   _of_four, attrs=("dims",))
op("last", "the last row of a tile, as a vector, or the last entry of a vector. `before`: the one so many before it",
   _drop_first, lambda attrs, x: x[-1 - attrs.get("before", 0)], attrs=("before",),
   zero=zeros.column_sums, text=texts.last, view=("cores",), entry=True, loaded="last", across_rows=True, vjp=vjps.last)
op("delay", "the rows of a tile moved down by as many tokens as further operands. These are the first rows, in their order. "
   "`given`: the rows lie so already, and the further operands are the first rows in a sequence's first chunk only",
   _delayed, _delay, attrs=("given",), zero=zeros.delayed, text=texts.delay, across_rows=True, vjp=vjps.delay)
op("advance", "the rows of a tile moved up by `by` tokens. Its last rows are zero", _matrix("advance"), _advance, attrs=("by",),
   zero=zeros.same, text=texts.advance, across_rows=True)
op("latest", "the row of the chunk's last token, which in a ragged tail is not the last row", _drop_first,
   zero=zeros.columns_of, text=texts.last, across_rows=True, vjp=vjps.latest)
op("to_middle", "the log decay between each row of running sums x and the middle row m of its 2 size rows, the last of "
   "their first half: x[i] - x[m] in the second half, x[m] - x[i] in the first. With sums y before each token as second operand "
   "y[i] - x[m] in the second half. `given`: the last operand has x[m] in each row", _sums_of_rows("to_middle"), _to_middle,
   attrs=("size", "given"), zero=zeros.differences,
   across_rows=True, view=("threads",))
op("from_middle", "x[i] - x[m] in all rows i, for running sums x and the middle row m as in to_middle. It is positive in rows "
   "before m. With sums y before each token as second operand y[i] - x[m]. `given`: as for to_middle",
   _sums_of_rows("from_middle"), _from_middle,
   attrs=("size", "given"), zero=zeros.differences, across_rows=True, view=("threads",))
op("halves", "of each 2 size rows the first half of a, and the second half of b", _alike("halves"), _halves, elementwise=True,
   attrs=("size",), zero=zeros.all_operands)
op("decayed_product", "entry i, j is the sum over channels c of a[i, c] b[j, c] exp(x[i, c] - x[j, c]) for j <= i, else 0. "
   "x: running sums of log decays. With sums y before each token as fourth operand exp(y[i, c] - x[j, c]) for j < i. The pass "
   "`decayed_products` replaces it", _decayed_product, _decayed,
   zero=zeros.decayed_product, text=texts.call("_decayed_product"), sums=lambda attrs: ((0, 1), (1, 1)),
   vjp=vjps.decayed_product)
op("decayed_pairs", "as decayed_product, below the diagonal; other entries are 0. a and b may have another dtype than the sums. "
   "Exponents are relative to the middle row of each 16 rows where that makes none larger than `limit`, of either sign. inf: "
   "always", _decayed_pairs_type,
   lambda attrs, a, b, x, *before: _decayed(attrs, a.to(x.dtype), b.to(x.dtype), x, *before).tril(-1), attrs=("limit",),
   zero=zeros.decayed_product, text=texts.call("decayed_pairs"), sums=lambda attrs: ((0, 1), (1, 1)))
op("decayed_matmul", "row i is the sum over j < i of p[i, j] b[j, c] exp(x[i, c] - x[j, c]), for each channel c. x: running "
   "sums of log decays. With sums y before each token as fourth operand exp(y[i, c] - x[j, c]). `transposed`: row j is the sum "
   "over i > j of p[i, j] b[i, c] exp(x[i, c] - x[j, c]). p is zero on and above its diagonal. The pass `decayed_products` "
   "replaces it", _decayed_matmul_type, _decayed_matmul, attrs=("transposed",),
   zero=zeros.decayed_matmul, text=texts.decayed_matmul, sums=lambda attrs: ((0, 0 if attrs.get("transposed") else 1), (1, 0)))
op("decayed_blocks", "as decayed_matmul, but of tokens in the same block of `size` rows alone. p has to be zero on and above the "
   "diagonal of these blocks. Exponents are relative to the middle row of a block, on Hopper of each 16 rows, where that makes "
   "none larger than `limit`, of either sign. inf: always. `given`: the last operand has a block's middle row, in each row",
   _decayed_blocks_type, _decayed_blocks,
   attrs=("size", "limit", "transposed", "given"), zero=zeros.decayed_matmul, text=texts.decayed_blocks,
   sums=lambda attrs: ((0, 0 if attrs.get("transposed") else 1), (1, 0)))
op("of_token", "the row of the chunk's token in the tile of a group of tokens, or its entry in a vector", _of_token,
   elementwise=True, zero=zeros.column_sums)
op("row_sum", "sum over the columns of each row, or over the entries of a vector. `diagonal`: the operand is zero off its "
   "diagonal, so that padding adds nothing to the other rows", _row_sum, lambda attrs, x: x.sum(-1), attrs=("diagonal",),
   zero=zeros.rows, text=texts.after(".sum(-1)"), sums=lambda attrs: () if attrs.get("diagonal") else ((0, -1),),
   vjp=vjps.row_sum)
op("row_max", "the largest entry of each row, or of a vector. `within`: a dim; entries past the dim's size in memory do not "
   "count. Targets may leave out NaN", _row_max, attrs=("within",), zero=zeros.rows, text=texts.after(".amax(-1)"))
op("column_sum", "sum over the rows of each column. `parts`: a tile with such a row for each of so many equal runs of rows",
   _column_sum, lambda attrs, x: x.unflatten(0, (attrs["parts"], -1)).sum(1) if attrs.get("parts") else x.sum(0),
   attrs=("parts",), zero=zeros.column_sums, text=texts.after(".sum(-2)"), sums=lambda attrs: ((0, 0),), vjp=vjps.column_sum)
op("diagonal", "the entries on the diagonal, as a vector", _diagonal, lambda attrs, x: x.diagonal(), zero=zeros.diagonal,
   text=texts.after(".diagonal(dim1=-2, dim2=-1)"), vjp=vjps.diagonal)
op("lower", "entries on and below the diagonal; the others become `fill`", _square("lower"), _masked("lower"),
   elementwise=True, attrs=("fill",), zero=zeros.lower, text=texts.kept(0), vjp=vjps.masked)
op("strictly_lower", "entries below the diagonal; the others become `fill`", _square("strictly_lower"),
   _masked("strictly_lower"), elementwise=True, attrs=("fill",), zero=zeros.lower, text=texts.kept(-1), vjp=vjps.masked)
op("pairs", "keeps the lower left size x size block of each 2 size x 2 size block on the diagonal; other entries become `fill`. "
   "`both`: keeps the upper right one, too. So in each of several square blocks, one below the other", _stack("pairs"),
   _masked("pairs"), elementwise=True, attrs=("size", "fill", "both"), zero=zeros.pairs, vjp=vjps.masked)
op("diagonal_blocks", "keeps the size x size blocks on the diagonal; other entries become `fill`", _square("diagonal_blocks"),
   _masked("diagonal_blocks"), elementwise=True, attrs=("size", "fill"), zero=zeros.masked, vjp=vjps.masked)
op("eye", "the identity matrix, or several, one below the other. `within`: a dim; rows past the dim's size in memory are zero",
   lambda attrs: Tile(tuple(attrs["dims"])), attrs=("dims", "within"), zero=zeros.identity, text=texts.eye,
   view=("threads",))
op("unit_lower_inverse", "(I + x)^-1 for a strictly lower x", _square("unit_lower_inverse"), _inverse,
   text=texts.call("_unit_lower_inverse"), vjp=vjps.unit_lower_inverse)
op("diag_inverse", "the inverse (I + x)^-1 of each size x size block on the diagonal, x being the block's strictly lower "
   "part; entries outside of the blocks are 0. An optional vector multiplies the columns. `strict`: the ones on the diagonal "
   "are left out",
   _inverted, _diag_inverse,
   attrs=("size", "strict"), zero=zeros.inverted)
op("row_norm", "rows divided by sqrt(their sum of squares + eps)", _matrix("row_norm"), _row_norm, attrs=("eps",),
   zero=zeros.same, decompose=decompositions.row_norm, text=texts.row_norm, vjp=vjps.row_norm)
op("valid", "rows past the sequence's end become zero. `given`: instead, all rows become zero if this optional tensor is "
   "absent",
   lambda attrs, x: x, attrs=("given",), zero=zeros.valid, text=texts.after(""), vjp=vjps.valid)
op("transpose", "the transpose, in memory space `space`. `columns`: the result is distributed over an agent's cores by "
   "columns, not by rows", _transpose, lambda attrs, x: x.T, attrs=("columns", "space"), zero=zeros.transposed)
op("load", "a tile from global memory. An asynchronous copy arrives at the barrier `channel`, or at `tail` for a ragged "
   "tail. With an operand: a conditional load, which happens if that number is negative; otherwise the result is the second "
   "operand, or zeros. `parts_ahead`: loads the tile of this number of parts later; zeros past the last part. `last`: only "
   "the last entry of a vector, or the last row of a tile in a channel. `one_token`: the row of a chunk's only token, without "
   "the axis of tokens. `tokens`: the rows of a group of so many such tokens, in which this one is. `described`: uses a tensor "
   "descriptor of the sequence's rows. `unfilled`: rows past the sequence's end may hold anything. `piece`: (first, size), only "
   "these columns of rows in memory; the size may be a dim. `begun`: the copy of a ragged tail begins with that of this "
   "value, an earlier load. `delay`: the rows of this number of tokens before, zeros before the sequence's first token. "
   "`middle`: in each row the middle row of its 2 middle rows, the last of their first half",
   _loaded, effect="read",
   attrs=("tensor", "head", "heads", "transposed", "channel", "tail", "parts_ahead", "columns", "last", "described", "one_token",
          "tokens", "unfilled", "piece", "middle", "begun", "delay"))
op("store", "a tile to global memory. `parts_ahead`: stores the tile of this number of parts later; no effect past the last. "
   "`one_token`, `piece`: as for load", _effect,
   effect="write", attrs=("tensor", "head", "heads", "row", "col", "transposed", "columns", "parts_ahead", "one_token", "piece"))
op("resume", "the state from which a chunk of a tree starts: the tile of `tensor` that this walk stored after the chunk that "
   "`parents` names. The first operand, the state after the chunk before, if that is the parent or if the parent's tile was not "
   "stored. The second operand, the initial state, if the parent is negative. It and the tile in memory may have another dtype",
   _resumed, effect="read", attrs=("tensor", "parents", "transposed"), zero=zeros.all_operands)
op("warm_up_length", "the warm-up length of a part, in chunks: the least n for which the sum of `tensor` over the n chunks "
   "before the part is at most -`bound`. If the sum stays above: all chunks back to the sequence's first. If the call has "
   "summaries: -1 if n is more than `most` times the chunks of a part, or more than these and `limit`, or if the sum stays above "
   "and so many chunks like these would not reach the bound. `longest`: instead, -1 if n is more than so many chunks. `step`: -1 "
   "if parts are of a walk back. Without `tensor`: -1. "
   "0 in the first part. `parts_ahead`: for the part this number of parts later; 0 past the last. `kept`: the tensor "
   "in which an earlier kernel stored it for all parts but the first, if that kernel ran",
   _scalar, effect="read",
   attrs=("tensor", "bound", "most", "limit", "longest", "step", "parts_ahead", "kept"))
op("return_unless_negative", "ends the instance unless the number is negative", _takes_a_number, effect="write")
op("set_if_negative", "sets the counter `tensor` to one if the number is negative", _takes_a_number, effect="write",
   attrs=("tensor",))
op("return_if_zero", "ends the instance if the counter `tensor` is zero, once the kernels of the call that started before have "
   "ended", _effect, effect="write", attrs=("tensor",))
op("return_if_set", "the same if the counter is not zero", _effect, effect="write", attrs=("tensor",))
op("choose_parts", "stores in `tensor`, once for the kernel, which chunks each part has, those of the longest sequence first. A "
   "part has as many as take the least time for the sequences of the call, by `costs`. If each sequence is one part, the number "
   "of chunks is that of all chunk slots", _effect, effect="write", attrs=("tensor", "costs"))
op("return_unless_split", "ends the instance if each sequence is one part", _effect, effect="write")
op("claim_part", "ends one of the two instances of a part. The operand is the warm-up length. The first instance, which starts "
   "earlier, continues if the length is more than half of the part's chunks; the second continues if it is not",
   _takes_a_number, effect="write")
op("if_negative", "the tile if the number, the first operand, is negative; else zeros, whatever the tile holds", _if_negative,
   _kept_if_negative, elementwise=True, zero=zeros.second)
op("clear_counter", "sets the counter `tensor` to zero, once for the kernel", _effect, effect="write", attrs=("tensor",))
op("claim_item", "the number of an item that no block has claimed yet, from the counter `tensor`. A block's first item has the "
   "block's own number. A number past the last item ends the loop", _scalar, effect="read", attrs=("tensor",))
op("next_item", "the agent's loop over items goes on with the item of this number", _takes_a_number, effect="write")
op("move", "the same value in another memory space. `spread`: a vector with its entries apart, as a caller's memory has them",
   _same("move"), lambda attrs, x: x, attrs=("space", "transposed", "spread"),
   zero=zeros.same)
op("signal", "signals `channel`: a buffer is full, or free again", _effect, effect="sync",
   attrs=("channel", "src", "dst", "id", "loop", "why", LATE))
op("wait", "waits until `channel` was signalled, in this iteration of the loop or `back` iterations before, or for asynchronous "
   "copies, but for the last `pending` ones", _effect,
   effect="sync", attrs=("channel", "src", "dst", "id", "loop", "why", "back", "pending"))
op("fence", "makes the agent's earlier writes visible to the units that read shared memory asynchronously",
   _effect, effect="sync", attrs=(LATE,))
op("warp_barrier", "the threads of a warp that runs the iteration alone wait for each other: each then sees what the others "
   "wrote to shared memory before", _effect, effect="sync")
op("drain", "waits until the products that the agent started are complete, but for those that `but` names, which started last",
   _effect, effect="sync", attrs=("but",))
op("await_kernels", "waits until the kernels of the call that started earlier have ended; with an operand, if that number is "
   "negative", _effect, effect="sync")
op("barrier", "orders all earlier ops of the agent (or of `scope`) before its later ones. Scope \"cores\": the cores of an agent "
   "wait for each other's pipe `src`", _effect, effect="sync",
   attrs=("scope", "ids", "src", "why"))
