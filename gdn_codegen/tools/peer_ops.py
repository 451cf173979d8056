"""Ops of other libraries that compute a page, and the package's ops of the same names, which take the same arguments."""
from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ..ir.page import Algorithm
from .peers import BY_PAGE, GATES, TOKENS, Peer, Problem, Refused, Run

FLA = ("flash-linear-attention", "fla-core")
#: Gates of channels.
CHANNELS = {"g": ("float32", "1, T, HV, K")}
#: Rows of a value head.
KEYS, VALUES = ("input", "1, T, HV, K"), ("input", "1, T, HV, V")


def _inputs(x: Problem) -> dict[str, Any]:
    return {**x.inputs, **x.numbers, **x.said, "output_final_state": True}


def _heads_decay(x: Problem) -> dict[str, Any]:
    """Those of chunk_simple_gla with a decay for each head, as chunk_lightning_attn calls it."""
    given = _inputs(x)
    return {"g_gamma": given.pop("g"), **given}


def _by_steps(x: Problem) -> dict[str, Any]:
    """Two steps for each token, one after the other."""
    given = _inputs(x)
    for n in ("k", "v", "beta"):
        pair = [given.pop(f"{n}{i}") for i in (1, 2)]
        given[n] = torch.stack(pair, dim=2).flatten(1, 2)
    return {**given, "num_householder": 2}


def _mamba(x: Problem) -> dict[str, Any]:
    """Those of mamba-ssm. It has C, B and x for q, k and v. dt is above 0 already."""
    if len(x.lengths) > 1:
        raise Refused(f"sequences: got {len(x.lengths)}; mamba_chunk_scan_combined accepts one here")
    given = dict(x.inputs)
    return {"x": given["v"], "dt": given["dt"], "A": given["A"], "B": given["k"], "C": given["q"], "chunk_size": 64,
            "D": given["D"], "return_final_states": True}


def _of_mamba(results: Any) -> tuple[torch.Tensor, ...]:
    return results[0], results[1].transpose(-1, -2)


@dataclass(frozen=True)
class PeerOp:
    """peer, module, name: the library, its module and its function; the package has a function of that name. takes: as in Peer.
    given: (problem) -> arguments, without cu_seqlens. results: what it returns -> the outputs, then states [N, HV, K, V].
    hint: as in Peer. options: (asked of the package's op) fields of a Request. steps: how many tokens of chunk_gated_delta_rule,
    whose kernels the package's op then runs, a token takes.
    """

    module: str
    name: str
    takes: Mapping[str, tuple[str, str]]
    given: Callable[[Problem], dict[str, Any]] = _inputs
    results: Callable[[Any], tuple[torch.Tensor, ...]] = tuple
    peer: str = "fla"
    distributions: tuple[str, ...] = FLA
    groups: bool = False
    packed: bool = True
    hint: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    steps: int = 1

    def called(self, x: Problem, check: Callable[..., None]) -> Run:
        """A call of the library's function on the problem."""
        op, given = getattr(importlib.import_module(self.module), self.name), self.given(x)
        rest = {"cu_seqlens": x.ends.long()} if len(x.lengths) > 1 else {}
        if not x.said:
            check(**{n: t for n, t in given.items() if isinstance(t, torch.Tensor)}, **rest)
        return lambda: self.results(op(**given, **rest))

    def ours(self, layout: str, options: Mapping[str, Any], x: Problem) -> Run:
        """A call of the package's op on the problem. options: further arguments."""
        import gdn_codegen
        op, given = getattr(gdn_codegen, self.name), self.given(x)
        if layout != "bthd":
            given = {n: t.transpose(1, 2).contiguous() if isinstance(t, torch.Tensor) and t.ndim > 2 else t
                     for n, t in given.items()} | {"layout": layout}
        given |= {"cu_seqlens": x.ends} if len(x.lengths) > 1 else {}
        given |= options

        def run() -> tuple[torch.Tensor, ...]:
            o, *states = self.results(op(**given))
            return (o if layout == "bthd" else o.transpose(1, 2), *states)
        return run

    def as_peer(self) -> Peer:
        """The library's op as a peer."""
        return Peer(self.peer, self.module, self.distributions, {**self.takes, "cu_seqlens": ("int64", "N + 1")}, self.called,
                    head_dims=(64, 128), groups=self.groups, packed=self.packed, note=self.name, hint=self.hint,
                    of_layers=True)


#: Page -> the op.
OPS = {
    "gated_delta_rule": PeerOp("fla.ops.gated_delta_rule", "chunk_gated_delta_rule", {**TOKENS, **GATES}, groups=True),
    "delta_rule": PeerOp("fla.ops.delta_rule", "chunk_delta_rule", {**TOKENS, "beta": GATES["beta"]}),
    "simple_gla": PeerOp("fla.ops.simple_gla", "chunk_simple_gla", {**TOKENS, "g": GATES["g"]}),
    "lightning_attention": PeerOp("fla.ops.simple_gla", "chunk_simple_gla", {**TOKENS, "g_gamma": ("float32", "HV")},
                                  _heads_decay),
    "gla": PeerOp("fla.ops.gla", "chunk_gla", {**TOKENS, **CHANNELS}),
    "kimi_delta_attention": PeerOp("fla.ops.kda", "chunk_kda", {**TOKENS, **CHANNELS, "beta": GATES["beta"]}, groups=True),
    "gated_delta_rule_2": PeerOp("fla.ops.gdn2", "chunk_gdn2", {**TOKENS, **CHANNELS, "b": KEYS, "w": VALUES}),
    "rwkv7": PeerOp("fla.ops.rwkv7", "chunk_rwkv7", {"r": KEYS, "w": CHANNELS["g"], "k": KEYS, "v": VALUES, "a": KEYS, "b": KEYS},
                    groups=True),  # all inputs have the value heads
    "gated_delta_product": PeerOp(
        "fla.ops.gated_delta_product", "chunk_gated_delta_product",
        {"q": TOKENS["q"], "k": ("input", "1, 2 T, H, K"), "v": ("input", "1, 2 T, HV, V"), "g": GATES["g"],
         "beta": ("float32", "1, 2 T, HV")}, _by_steps, steps=2),
    "mamba2": PeerOp(
        "mamba_ssm.ops.triton.ssd_combined", "mamba_chunk_scan_combined",
        {"x": TOKENS["v"], "dt": GATES["g"], "A": ("float32", "HV"), "B": TOKENS["k"], "C": TOKENS["q"], "D": ("float32", "HV")},
        _mamba, _of_mamba, "mamba_ssm", ("mamba-ssm",), groups=True, packed=False,
        hint="mamba-ssm with its CUDA build; or of its source mamba_ssm/ops/triton and mamba_ssm/utils alone, with an empty "
             "mamba_ssm/__init__.py, and einops",
        options={"state_v_first": True, "forms": "dt=rectified", "chunk_size": 64})}
#: All libraries that are compared with.
LIBRARIES = tuple(dict.fromkeys((*(o.peer for o in OPS.values()), *(p.name for of in BY_PAGE.values() for p in of))))
_made = {n: o.as_peer() for n, o in OPS.items()}


def peers_of(page: Algorithm) -> dict[str, Peer]:
    """The peers of a page by name. A page of the user's own has none."""
    return {p.name: p for p in (*([_made[page.name]] if page.name in OPS else []),
                                *BY_PAGE.get(page.name, ()))}


def rivals(names: str, page: Algorithm) -> list[Peer]:
    """The peers of a page that a list of names, "all" or "none" asks for."""
    known = peers_of(page)
    asked = list(known) if names == "all" else [] if names == "none" else names.split(",")
    for n in asked:
        if n not in known:
            raise ValueError(f"peers: got {n!r} for {page.name}; accepted: {', '.join(('all', 'none', *known))}")
    return [known[n] for n in asked]
