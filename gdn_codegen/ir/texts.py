"""Ops as expressions in torch, for `OpDef.text`: (op, texts of its operands) -> an expression.

Operands may have leading dims, such as heads, so axes count from the last. A number that meets a tile has been broadcast.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .core import Op

TextRule = Callable[["Op", list[str]], str]


def infix(sign: str) -> TextRule:
    """x sign y."""
    return lambda o, x: f"{x[0]} {sign} {x[1]}"


def call(name: str) -> TextRule:
    """A call of a function."""
    return lambda o, x: f"{name}({', '.join(x)})"


def after(suffix: str) -> TextRule:
    """The operand, and then a method or an index of it."""
    return lambda o, x: f"{x[0]}{suffix}"


def expand(o: Op, x: list[str]) -> str:
    """A tile broadcast to other dims."""
    return f"{x[0]}.expand(*{x[0]}.shape[:-{len(o.attr('dims'))}], {_dims(o)})"


def full(o: Op, x: list[str]) -> str:
    """A tile in which every entry is a number."""
    return f"torch.full(({_dims(o)},), {o.attr('value')!r}, dtype=torch.float64)"


def eye(o: Op, x: list[str]) -> str:
    """The identity matrix."""
    return f"torch.eye({_dims(o)}, dtype=torch.float64)"


def _dims(o: Op) -> str:
    """The attribute `dims` of an op. The tokens of a chunk are `_tokens`, which a page's text sets."""
    return ", ".join("_tokens" if d == "C" else str(d) for d in o.attr("dims"))


def const(o: Op, x: list[str]) -> str:
    """A number in float64."""
    return f"torch.tensor({o.attr('value')!r}, dtype=torch.float64)"


def last(o: Op, x: list[str]) -> str:
    """The last entry of a vector, or the last row of a tile."""
    at = -1 - o.attr("before", 0)
    return f"{x[0]}[..., {at}]" if o.type is not None and not o.type.dims else f"{x[0]}[..., {at}, :]"


def delay(o: Op, x: list[str]) -> str:
    """Rows, and then those of a tile, as many as the tile has."""
    rows = ", ".join(f"{r}[..., None, :]" for r in x[1:])
    return f"torch.cat([{rows}, {x[0]}], -2)[..., :{x[0]}.shape[-2], :]"


def advance(o: Op, x: list[str]) -> str:
    """The rows of a tile from a number on, and then zeros."""
    by = o.attr("by")
    return f"torch.cat([{x[0]}[..., {by}:, :], torch.zeros_like({x[0]}[..., :{by}, :])], -2)"


def cumsum(o: Op, x: list[str]) -> str:
    """Running sums of a vector, or of each column of a tile."""
    sums = f"{x[0]}.cumsum({-o.type.rank if o.type is not None else -1})"
    return f"{sums} - {x[0]}" if o.attr("exclusive") else sums


def matmul(o: Op, x: list[str]) -> str:
    """A product of two tiles."""
    return f"{x[0]}{'.mT' if o.attr('ta') else ''} @ {x[1]}{'.mT' if o.attr('tb') else ''}"


def decayed_matmul(o: Op, x: list[str]) -> str:
    """A product of a tile whose entries decay with another tile."""
    return f"_decayed_matmul({', '.join(x)}{', transposed=True' if o.attr('transposed') else ''})"


def decayed_blocks(o: Op, x: list[str]) -> str:
    """That of a tile and another tile by sums. Loads of middle rows are no part of what it says."""
    return f"decayed_blocks({', '.join(x[:3])}{', transposed=True' if o.attr('transposed') else ''})"


def row_norm(o: Op, x: list[str]) -> str:
    """Rows divided by their length."""
    return f"{x[0]} * torch.rsqrt({x[0]}.square().sum(-1, keepdim=True) + {o.attr('eps', 1e-6)!r})"


def softplus(o: Op, x: list[str]) -> str:
    """log(1 + exp(x))."""
    return f"torch.logaddexp({x[0]}, torch.zeros_like({x[0]}))"


def kept(diagonal: int) -> TextRule:
    """The entries on and below a diagonal; the others become `fill`."""
    def text(o: Op, x: list[str]) -> str:
        fill = o.attr("fill", 0.0)
        if not fill:
            return f"{x[0]}.tril({diagonal})"
        return f'torch.where(torch.ones_like({x[0]}).tril({diagonal}) > 0, {x[0]}, float("{fill}"))'
    return text
