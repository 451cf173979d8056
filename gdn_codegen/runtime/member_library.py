"""The op of the family's members for torch.compile and torch.export: gdn_codegen::member.

It takes the page's name, its inputs, and arguments that no kernel writes to. A call with other arguments breaks the graph.
"""
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import algorithms
from ..host.arguments import _check_rank
from ..ir.builder import Algorithm
from ..ir.decays import log_decays
from .call.arguments import Tensors
from .call.members import OPEN, eager
from .call.normalise import request_of
from .torch_library import _no_gradient

#: Arguments of calls that the op takes, with their types in its schema and their defaults.
TAKEN: dict[str, tuple[str, Any]] = {
    "initial_state": ("Tensor?", None), "cu_seqlens": ("Tensor?", None), "cu_seqlens_cpu": ("Tensor?", None),
    "A_log": ("Tensor?", None), "dt_bias": ("Tensor?", None), "output_final_state": ("bool", False),
    "use_qk_l2norm_in_kernel": ("bool", False), "state_v_first": ("bool", False), "head_first": ("bool", False),
    "layout": ("str?", None), "gate": ("str", "log"), "beta_form": ("str", "given"), "target": ("str", "auto"),
    "schedule": ("str?", None), "chunk_size": ("SymInt?", None), "batch_invariant": ("bool?", None)}
_SCHEMA = ("(str algorithm, Tensor?[] inputs, str[] names, float? scale, str forms, str[] called, bool recurrent, "
           + ", ".join(f"{kind} {name}" for name, (kind, _) in TAKEN.items()) + ") -> Tensor[]")


def takes(arguments: dict[str, Any]) -> bool:
    """Whether the op has all arguments that are not as by default."""
    return all(n in TAKEN or x is None or x is False for n, x in arguments.items()) and (
        arguments.get("schedule") is None or isinstance(arguments["schedule"], str))


@torch.library.custom_op("gdn_codegen::member", mutates_args=(), schema=_SCHEMA)
def member(algorithm: str, inputs: Any, names: Any, scale: Any, forms: str, called: Any, recurrent: bool, *given: Any) -> Any:
    """Returns o, then the final state if the arguments ask for it."""
    others = {n: x for (n, (_, default)), x in zip(TAKEN.items(), given, strict=True) if x is not default}
    ours = {n: others.pop(n) for n in tuple(others) if n in (*Tensors._fields, *OPEN._fields)}
    numbers = {"scale": scale} if "scale" in algorithms.find(algorithm).scalars else {}
    results = eager(algorithm, dict(zip(names, inputs, strict=True)), numbers, ours, others, forms,
                    dict(zip(called[::2], called[1::2], strict=True)), recurrent)
    return [x for x in results if x is not None]


@member.register_fake
def _(algorithm: str, inputs: Any, names: Any, scale: Any, forms: str, called: Any, recurrent: bool, *given: Any) -> list[Tensor]:
    said = dict(zip(TAKEN, given, strict=True))
    return _results(algorithms.find(algorithm), dict(zip(names, inputs, strict=True)), said,
                    dict(zip(called[::2], called[1::2], strict=True)))


def _results(page: Algorithm, inputs: dict[str, Tensor], said: dict[str, Any], called: dict[str, str]) -> list[Tensor]:
    """Memory for what a call returns. called: what callers call inputs."""
    t = Tensors(*(said.get(n) for n in Tensors._fields))  # type: ignore[arg-type]
    asked = request_of(t, OPEN._replace(**{n: x for n, x in said.items() if n in OPEN._fields}))
    sizes: dict[str, Any] = {}
    like, gates = next(iter(inputs.values())), log_decays(page.trace())
    for n, (heads, dims) in page.inputs.items():
        if "C" not in dims:
            continue
        x = inputs[n]
        _check_rank(called.get(n, n), x, 2 + len(dims), asked.layout)
        sizes |= {"B": x.shape[0], "T": x.shape[asked.axes[0]], heads: x.shape[asked.axes[1]],
                  **dict(zip(map(str, dims[1:]), x.shape[3:], strict=True))}
        if len(dims) > 1 and n not in gates and like is not inputs.get("v"):
            like = x
    sizes.setdefault("HV", sizes.get("H"))
    made = []
    for p in page.trace().role("output"):
        tile = [sizes[str(d)] for d in p.dims if d != "C"]
        if p.index == "token":
            rows = [sizes["T"], sizes["HV"]][::1 if asked.layout == "bthd" else -1]
            made.append(like.new_empty((sizes["B"], *rows, *tile)))
        elif asked.output_final_state:
            count = sizes["B"] if t.cu_seqlens is None else t.cu_seqlens.numel() - 1
            made.append(like.new_empty((count, sizes["HV"], *tile[::-1 if asked.state_v_first else 1]),
                                       dtype=getattr(torch, asked.state_dtype)))
    return made


member.register_autograd(_no_gradient)


def compiled(algorithm: str, inputs: dict[str, Any], numbers: dict[str, Any], arguments: dict[str, Any], forms: str,
             called: dict[str, str], recurrent: bool) -> tuple[Any, ...]:
    """What `eager` does, as an op that torch.compile takes whole: o, and the final state or None."""
    given = [arguments.get(n, default) for n, (_, default) in TAKEN.items()]
    names = [x for pair in called.items() for x in pair]
    made = member(algorithm, list(inputs.values()), list(inputs), numbers.get("scale"), forms, names, recurrent, *given)
    return made[0], made[1] if len(made) > 1 else None
