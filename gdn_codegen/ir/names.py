"""Names for values that the page does not name. A name is made of the op and the names of its operands.

`exp(G)` is named exp_G, `k @ k.T` is k_kT, `beta * v` is beta_v. If such a name has more than LONGEST characters, the value is
named after its use. On a line "U = ..." of the page it is operand_of_U if a product reads it, else U_sum, U_term and so on. If
the line is not known, it is named after an operand, for example beta_scaled. Decays of a chunk have names of their own:
exp(last(G)) is chunk_decay, and exp(last(G) - G), from each token to the chunk's end, is decay_to_end. A cast appends its dtype
(_f16). Passes append words for moves and copies (_shared, _next). Emitted names therefore have about 24 characters at most.
"""
from __future__ import annotations

import re
from typing import Any

#: The most characters of a name, without the words for casts and moves.
LONGEST = 18
DTYPES = {"float16": "f16", "bfloat16": "bf16", "float32": "f32", "float64": "f64"}
#: Suffixes for the dtype or the shape in which a value is held. They do not describe what is computed.
HELD = re.compile(r"_(?:f16|bf16|f32|f64|col|row|in)$")
_BETWEEN = {"add": "_plus_", "sub": "_minus_", "mul": "_", "div": "_over_", "maximum": "_max_", "minimum": "_min_"}
_BEFORE = {"neg": "minus_", "lower": "lower_", "strictly_lower": "below_", "unit_lower_inverse": "inverse_", "row_norm": "unit_",
           "cumsum": "sums_", "row_sum": "row_sums_", "row_max": "largest_", "column_sum": "column_sums_",
           "diagonal": "diagonal_"}
#: exp of these is the decay of a chunk, or from each token to the chunk's end.
_CHUNK, _TO_END = re.compile(r"last_(?!\w*_minus_)\w+"), re.compile(r"last_(\w+)_minus_\1")
#: The word for the value of an op, by kind.
_ROLES = {"add": "sum", "sub": "difference", "mul": "term", "div": "ratio", "matmul": "product", "exp": "exp"}


def stem(name: str) -> str:
    """The name without the suffixes of HELD."""
    while HELD.search(name):
        name = HELD.sub("", name)
    return name


def name_of(kind: str, args: tuple[str, ...], attrs: dict[str, Any], line_value: str = "", operand: bool = False) -> str:
    """A name for the value of an op with operands `args`.

    line_value: the value that the op's line of the page defines, "" if it is not known. operand: whether a product reads the
    value.
    """
    if kind == "cast":
        return f"{stem(args[0])}_{DTYPES[attrs['to']]}"
    if kind in ("col", "row"):
        return f"{args[0]}_{kind}"
    own = {"const": _constant(attrs.get("value", 0.0)), "eye": "identity",
           "scalar": attrs.get("param") or attrs.get("tensor"), "load": attrs.get("tensor")}
    if kind in own or not args:
        return str(own.get(kind) or kind)
    plain = _plain(kind, tuple(map(stem, args)), attrs)
    if len(plain) <= LONGEST:
        return plain
    if kind == "mul" and any(stem(a).endswith("decay_to_end") for a in args):
        return f"{next((x for x in map(stem, args) if not x.endswith('decay_to_end')), args[0])}_to_end"
    if line_value:
        return f"operand_of_{line_value}" if operand else f"{line_value}_{_ROLES.get(kind, kind)}"
    word = _block(kind, attrs) or ("scaled" if kind == "mul" else _ROLES.get(kind, kind))
    stems = [stem(a) for a in args if not a.startswith("const_")] or [stem(a) for a in args]
    subject = stems[-1] if len(stems[-1]) + len(word) < LONGEST else min(stems, key=len)
    while len(subject) + len(word) >= LONGEST and "_" in subject:
        subject = subject.rpartition("_")[0]
    return f"{subject}_{word}"


def _block(kind: str, attrs: dict[str, Any]) -> str:
    """The rows of the diagonal blocks that a mask keeps, or of which it keeps a part. "" for another op."""
    return str(attrs["size"] * (1 + (kind == "pairs"))) if kind in ("pairs", "diagonal_blocks") else ""


def _plain(kind: str, args: tuple[str, ...], attrs: dict[str, Any]) -> str:
    """The name that describes the op and all of its operands, of any length."""
    if kind == "matmul":
        product = f"{args[0]}{'T' if attrs.get('ta') else ''}_{args[1]}{'T' if attrs.get('tb') else ''}"
        return f"{args[2]}_plus_{product}" if len(args) > 2 else product
    if rows := _block(kind, attrs):
        return f"{args[0]}_{rows}"
    if kind in ("to_middle", "from_middle"):
        return f"{args[0]}_{kind.partition('_')[0]}_{attrs['size']}"
    if kind == "last" and attrs.get("before"):
        return f"{args[0]}_{attrs['before']}_before_last"
    if kind == "block":
        return f"{args[0]}_{attrs['row']}_{attrs['col']}"
    if kind == "exp" and (_TO_END.fullmatch(args[0]) or _CHUNK.fullmatch(args[0])):
        return "decay_to_end" if _TO_END.fullmatch(args[0]) else "chunk_decay"
    if kind == "mul":
        args = tuple(sorted(args, key=lambda a: (a.startswith("const_"), a.endswith("decay_to_end"))))
    if args[1:] and args[1].startswith("const_"):
        return f"{args[0]}{_BETWEEN.get(kind, '_')}{'times_' if kind == 'mul' else ''}{args[1].removeprefix('const_')}"
    if kind in _BETWEEN and len(args) == 2:
        return _BETWEEN[kind].join(args)
    return f"{_BEFORE.get(kind, f'{kind}_')}{'_'.join(args)}"


def _constant(x: float) -> str:
    """The name of a number, such as const_1_25 or const_minus_105."""
    return f"const_{'minus_' if x < 0 else ''}{abs(x):g}".translate(str.maketrans(".-+", "___"))
