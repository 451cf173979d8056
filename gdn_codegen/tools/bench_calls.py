"""The calls that `bench` times: of a build, of the package's op, and the two directions of a differentiable call."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch

from ..runtime.build import LAYOUTS, Build
from ..runtime.call.arguments import Tensors
from ..runtime.call.choose import choice
from ..runtime.call.request import Inputs, Request, call_for
from ..runtime.load import function
from .peer_ops import PeerOp
from .peers import Problem, Refused, Run


@dataclass(frozen=True)
class Auto:
    """The package's op that computes a page. It chooses a build by target, device and shape. chunk: None leaves it open, too."""

    op: PeerOp
    target: str
    chunk: int | None = None
    layout: str = "bthd"
    unit_keys: bool = False

    def build(self, x: Problem) -> Build:
        """The build that the op runs on these tensors."""
        asked = {**self.op.options, **({"chunk_size": self.chunk} if self.chunk else {})}
        request = Request(output_final_state=True, unit_keys=self.unit_keys, target=self.target, layout=LAYOUTS[self.layout],
                          algorithm=x.page.name if self.op.steps == 1 else "gated_delta_rule", **asked)
        about = Inputs(tuple(x.inputs.values()), (), (), x.dtype, x.dims, x.heads, (1, self.op.steps * sum(x.lengths)))
        tensors = Tensors._make([None] * len(Tensors._fields))._replace(cu_seqlens=x.ends if len(x.lengths) > 1 else None)
        return choice(call_for(about, tensors, request)).build

    def prepare(self, x: Problem) -> Run:
        """A call of the op on the problem, with the options of this row."""
        options = {"target": self.target, **({"chunk_size": self.chunk} if self.chunk else {}),
                   **({"unit_keys": True} if self.unit_keys else {})}
        return self.op.ours(self.layout, options, x)


def ours(b: Build, x: Problem) -> Run:
    """A call of a build's function on tensors in the build's layout."""
    op, turned = function(b), b.layout != "bthd"
    given = [t.transpose(1, 2).contiguous() if turned else t for t in x.inputs.values() if t.ndim > 2]
    of_heads = {n: t for n, t in x.inputs.items() if t.ndim < 3}
    ends, outputs = x.ends if len(x.lengths) > 1 else None, sum(t.index == "token" for t in x.page.trace().role("output"))

    def run() -> tuple[torch.Tensor, ...]:
        results = op(*given, **of_heads, **x.numbers, output_final_state=True, cu_seqlens=ends)
        return tuple(t.transpose(1, 2) if turned and i < outputs else t for i, t in enumerate(results))
    return run


def ours_of(wish: Build | Auto, x: Problem) -> tuple[Build, str, Callable[[Problem], Run], int]:
    """Of a build, or of an op: the build that runs, the name of the row, what prepares a call of it, and the tokens of the build
    for each token of the problem."""
    if isinstance(wish, Auto):
        return wish.build(x), f"{wish.target} auto", wish.prepare, wish.op.steps
    return wish, f"{wish.target} {wish.plan.name} c{wish.chunk}", partial(ours, wish), 1


def directions(prepare: Callable[[Problem], Run], x: Problem) -> tuple[Run, Run, torch.Tensor]:
    """The forward call where all inputs require gradients, the backward pass of one such call, and the gradient by o from which
    it starts. prepare: makes the call. Refused if its outputs have no gradient."""
    leaves = {n: t.detach().clone().requires_grad_() for n, t in x.inputs.items()}
    with torch.enable_grad():
        forward = prepare(replace(x, inputs=leaves))
        o = forward()[0]
    if not o.requires_grad:
        raise Refused("gradient: this call gives none")
    gen = torch.Generator(o.device).manual_seed(0)
    d_o = torch.randn(o.shape, generator=gen, device=o.device).to(o.dtype)
    return forward, lambda: torch.autograd.grad(o, list(leaves.values()), d_o, retain_graph=True, allow_unused=True), d_o
