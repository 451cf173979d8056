"""The rules of PTO: op -> its lines of text."""
from __future__ import annotations

from collections.abc import Sequence

from ...ir.types import BYTES
from ..base import EmitError, Op
from . import global_memory  # noqa: F401  which has the rules of loads and stores
from .kernel import KernelWriter, assigned, braces, rule
from .values import CTYPE, literal

__all__ = ["rule"]


# --- rules: vector cores ---
OPERATORS = {"add": "+", "sub": "-", "mul": "*", "div": "/"}
FRACTAL = 16  # rows and columns of the blocks in which L0 and L1 lay out tiles of 16 bits
SHORT = {"add": "ADD", "sub": "SUB", "mul": "MUL", "div": "DIV", "maximum": "MAX", "minimum": "MIN"}


@rule("add", "sub", "mul", "div", "maximum", "minimum")
def _binary(k: KernelWriter, o: Op) -> list[str]:
    """An op with two operands: two numbers, a tile and a number, a tile and a column, or two tiles or vectors.

    EmitError for a number as first operand of a tile op. The pass `vectorise` swaps such operands.
    """
    x, y = o.args
    out, a, b = k.name(o.out), k.name(x), k.name(y)
    if k.is_number(o.out):
        if o.kind in OPERATORS:
            return [f"const float {out} = {a} {OPERATORS[o.kind]} {b};"]
        return [f"const float {out} = {a} {'>' if o.kind == 'maximum' else '<'} {b} ? {a} : {b};"]
    if k.is_number(x):
        raise EmitError(f"pto has no {o.kind} of a number and a tile ({o.out}); pass vectorise should have swapped them")
    if k.is_number(y):
        if o.kind == "sub":
            return [f"TADDS({out}, {a}, {b[1:] if b.startswith('-') else '-' + b});"]
        return [f"T{SHORT[o.kind]}S({out}, {a}, {b});"]
    if k.is_col(y):
        return [f"TROWEXPAND{SHORT[o.kind]}({out}, {a}, {b});"]
    lines = []
    if k.type[o.out].rank == 1 and not k.is_wide(o.out) and not k.whole(o.out):  # this core's part
        n = k.buffer(o.out).shape[0]
        for v in dict.fromkeys((x, y)):
            if k.whole(v):
                lines += [assigned(f"UbTile<float, 1, {n}>", f"{k.name(v)}_mine_{out}", f"{k.address(v)} + sub * {4 * n}")]
        a, b = (f"{k.name(v)}_mine_{out}" if k.whole(v) else k.name(v) for v in (x, y))
    return [*lines, f"T{SHORT[o.kind]}({out}, {a}, {b});"]


@rule("exp", "log", "rsqrt")
def _unary(k: KernelWriter, o: Op) -> list[str]:
    if k.is_number(o.out):
        raise EmitError(f"pto has no {o.kind} of a number ({o.out}); apply it to the vector that the number comes from")
    return [f"T{o.kind.upper()}({k.name(o.out)}, {k.name(o.args[0])});"]


@rule("cast")
def _cast(k: KernelWriter, o: Op) -> list[str]:
    if not o.buffer:
        return []  # the store that reads it rounds
    out, x = k.name(o.out), k.name(o.args[0])
    if k.agent == "cube":
        return [f"TMOV({out}, {x});"]
    mode = "CAST_NONE" if o.attr("to") == "float32" else "CAST_RINT"
    return [f"TCVT({out}, {x}, RoundMode::{mode});"]


@rule("const", "scalar", "col", "row", "segment", "block", "blocks")
def _view(k: KernelWriter, o: Op) -> list[str]:
    return []


@rule("last")
def _last(k: KernelWriter, o: Op) -> list[str]:
    x = o.args[0]
    value = f"{k.name(x)}.GetValue({k.buffer(x).shape[0] - 1 - o.attr('before', 0)})"
    return [f"const float {k.name(o.out)} = {f'rows{k.which} > 0 ? {value} : 0.0f' if k.which else value};"]


@rule("full")
def _full(k: KernelWriter, o: Op) -> list[str]:
    return [f"TEXPANDS({k.name(o.out)}, {literal(o.attr('value'))});"]


@rule("expand")
def _expand(k: KernelWriter, o: Op) -> list[str]:
    x = o.args[0]
    if k.is_number(x):
        return [f"TEXPANDS({k.name(o.out)}, {k.name(x)});"]
    if k.is_col(x):
        raise EmitError(f"pto expands rows and numbers; {o.out} expands a column")
    return [f"TCOLEXPAND({k.name(o.out)}, {k.name(x)});"]


@rule("row_sum")
def _row_sum(k: KernelWriter, o: Op) -> list[str]:
    b = k.buffer(o.out)
    return braces([assigned(f"UbCol<float, {b.shape[0]}>", "sums", k.address(o.out)),
                   f"TROWSUM(sums, {k.name(o.args[0])}, {o.out}_scratch);"])


@rule("add_rows")
def _add_rows(k: KernelWriter, o: Op) -> list[str]:
    places = ", ".join(str(o.attr(n)) for n in ("to", "of", "width"))
    return [f"add_rows<{o.attr('count')}, {o.attr('step')}>({k.name(o.out)}, {k.address(o.out)}, {places});"]


@rule("join")
def _join(k: KernelWriter, o: Op) -> list[str]:
    lines, at = [], 0
    for x in o.args:
        n = k.buffer(x).shape[0]
        lines += braces([assigned(f"UbTile<float, 1, {n}>", "to", k.address(o.out, at)), f"TMOV(to, {k.name(x)});"])
        at += 4 * n
    return lines


@rule("diagonal_stack")
def _diagonal_stack(k: KernelWriter, o: Op) -> list[str]:
    """Casts of the blocks in this core's rows. Its first block begins in the column with the number of its first row."""
    x, b = k.buffer(o.args[0]), k.buffer(o.out)
    first = f"{k.address(o.args[0])} + sub * {x.shape[0] * BYTES[x.dtype]}"
    return [f"diagonal_stack<{b.shape[1]}>({k.name(o.out)}, {k.address(o.out)}, {k.name(o.args[0])}, {first});"]


# --- rules: cube core, and moves ---
@rule("move")
def _move(k: KernelWriter, o: Op) -> list[str]:
    """A copy within a core: to the operand buffers of the cube core, between the spread and the dense form of a vector, of heads
    from rows to columns, or plain.

    EmitError for a transposed block.
    """
    x, out, b = o.args[0], k.name(o.out), k.buffer(o.out)
    if b.space in ("L0A", "L0B"):
        part = k.defs.get(x)
        if part is not None and part.kind == "blocks":
            return _extracted(k, o, part)
        if part is not None and part.kind == "block":
            if o.attr("transposed"):
                raise EmitError(f"pto cannot transpose a block of a tile ({o.out}); transpose the tile before")
            return [f"TEXTRACT({out}, {k.name(part.args[0])}, {part.attr('row')}, {part.attr('col')});"]
        if not o.attr("transposed"):
            return [f"TEXTRACT({out}, {k.name(x)}, 0, 0);"]
        transposed = f"{out}_from"
        return [f"L1View<{CTYPE[b.dtype]}, {b.shape[0]}, {b.shape[1]}> {transposed};", f"TRESHAPE({transposed}, {k.name(x)});",
                f"TEXTRACT({out}, {transposed}, 0, 0);"]
    if (k.is_wide(x) and not k.is_wide(o.out)) or k.by_head(x):
        return [f"TTRANS({out}, {k.name(x)}, {o.out}_scratch);"]
    if k.is_wide(o.out) and not k.is_wide(x):
        return braces([assigned(f"UbTile<{CTYPE[b.dtype]}, {b.shape[0]}, {b.shape[1]}>", "wide", k.address(o.out)),
                       assigned(f"UbCol<{CTYPE[b.dtype]}, {b.shape[0]}>", "flat", k.address(o.args[0])),
                       "TROWEXPAND(wide, flat);"])
    return [f"TMOV({out}, {k.name(x)});"]


def _extracted(k: KernelWriter, o: Op, part: Op) -> list[str]:
    """A move of blocks of a tile to the operand buffers. EmitError for transposed blocks."""
    if o.attr("transposed"):
        raise EmitError(f"pto cannot transpose blocks of a tile ({o.out}); transpose the tile before")
    whole, at, size = k.name(part.args[0]), part.attr("at"), part.attr("size")
    if len(at) == 1:
        return [f"TEXTRACT({k.name(o.out)}, {whole}, {at[0][0]}, {at[0][1]});"]
    b = k.buffer(o.out)
    block = f"{'TileLeft' if b.space == 'L0A' else 'TileRight'}<{CTYPE[b.dtype]}, {size}, {size}>"
    lines, bytes = [], size * size * BYTES[b.dtype]
    for n, some in _progressions(at):
        places = ", ".join(map(str, (*some[0], *_step(some))))
        lines.append(f"extract_blocks<{block}, {len(some)}>({k.address(o.out, n * bytes)}, {whole}, {places});")
    return lines


def _progressions(at: Sequence[tuple[int, int]]) -> list[tuple[int, Sequence[tuple[int, int]]]]:
    """Places of blocks in runs that a loop can go through, each with the number of its first: all of them, if each is as far from
    the one before, else each by itself."""
    even = all((x[0] + z[0], x[1] + z[1]) == (2 * y[0], 2 * y[1]) for x, y, z in zip(at, at[1:], at[2:], strict=False))
    return [(0, at)] if even else [(n, (x,)) for n, x in enumerate(at)]


def _step(at: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """From one place of a run to the next: rows and columns."""
    return (at[1][0] - at[0][0], at[1][1] - at[0][1]) if len(at) > 1 else (0, 0)


@rule("insert")
def _insert(k: KernelWriter, o: Op) -> list[str]:
    """Moves of blocks from L0C to their places in a tile of L1."""
    tile, blocks, lines = k.buffer(o.out), k.buffer(o.args[1]), []
    stack, size = blocks.shape
    for n, some in _progressions(o.attr("at")):
        (row, col), (rows, cols) = some[0], _step(some)
        first, step = ((x * tile.shape[0] + y * FRACTAL) * BYTES[tile.dtype] for x, y in ((col, row), (cols, rows)))
        lines.append(f"insert_blocks<{size}, {stack}, {len(some)}>({k.name(o.out)}, {k.address(o.out, first)}, {step}, "
                     f"{k.address(o.args[1], n * size * FRACTAL * 4)});")
    return lines


def _stacked(k: KernelWriter, o: Op) -> list[str]:
    """A product of each block of a stack with that of another. EmitError for larger blocks than a fractal."""
    rows, size = k.buffer(o.out).shape
    if size != FRACTAL:
        raise EmitError(f"pto multiplies stacks of blocks of {FRACTAL} rows; {o.out} has blocks of {size}")
    at = ", ".join(k.address(x) for x in (o.out, *o.args[:2]))
    adds = "true" if len(o.args) == 3 else "false"
    return [f"stacked_product<{CTYPE[k.buffer(o.args[0]).dtype]}, {rows}, {adds}>({at});  // {o.out}"]


@rule("matmul")
def _matmul(k: KernelWriter, o: Op) -> list[str]:
    if o.attr("stacked"):
        return _stacked(k, o)
    out, left, right = k.name(o.out), k.name(o.args[0]), k.name(o.args[1])
    if len(o.args) == 3:
        return [f"TMATMUL_ACC({out}, {k.name(o.args[2])}, {left}, {right});"]
    return [f"TMATMUL({out}, {left}, {right});"]


# --- rules: waits ---
@rule("signal")
def _signal(k: KernelWriter, o: Op) -> list[str]:
    src = str(o.attr("src"))
    if "." in src:
        return [f"ffts_cross_core_sync(PIPE_{src.split('.')[1]}, group_flag({o.attr('id')}));  // {o.attr('why')}"]
    return [f"set_flag(PIPE_{src}, PIPE_{o.attr('dst')}, {k.event(o)});  // {o.attr('why')}"]


@rule("wait")
def _wait(k: KernelWriter, o: Op) -> list[str]:
    if "." in str(o.attr("src")):
        return [f"wait_flag_dev({o.attr('id')});  // {o.attr('why')}"]
    return [f"wait_flag(PIPE_{o.attr('src')}, PIPE_{o.attr('dst')}, {k.event(o)});  // {o.attr('why')}"]


@rule("barrier")
def _barrier(k: KernelWriter, o: Op) -> list[str]:
    """A barrier of a pipe or a core, of the vector cores of a group, or of all cores of the device."""
    if o.attr("scope") == "cores":  # mode 1: the vector cores of a group
        (n,) = o.attr("ids")
        return [f"ffts_cross_core_sync(PIPE_{o.attr('src')}, all_flag({n}) | 1 << 4);  // {o.attr('why')}",
                f"wait_flag_dev({n});"]
    if o.attr("scope") != "device":
        return [f"pipe_barrier(PIPE_{o.attr('scope')});"]
    up, across, down = o.attr("ids")
    if k.agent == "vector":
        return ["pipe_barrier(PIPE_ALL);", f"ffts_cross_core_sync(PIPE_MTE3, group_flag({up}));", f"wait_flag_dev({down});"]
    return ["pipe_barrier(PIPE_ALL);", f"wait_flag_dev({up});", f"ffts_cross_core_sync(PIPE_FIX, all_flag({across}));",
            f"wait_flag_dev({across});", f"ffts_cross_core_sync(PIPE_FIX, group_flag({down}));"]
