"""Peers: other implementations of prefill that are installed here, with an adapter for each.

A peer states the dtype and shape of every tensor that it takes. The tensors that its adapter passes are compared with this
statement. So a layout or dtype that the peer would silently misread raises an error and is not timed. Gated DeltaNet has several
peers; another page has the library whose op of the same name the package offers, too (`peer_ops.py`), and KDA cuDNN's.
"""
from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ..ir.page import Algorithm

#: Returns the outputs [1, T, HV, ...], then the final states [N, HV, ...], in the page's order.
Run = Callable[[], tuple[torch.Tensor, ...]]


class Refused(ValueError):
    """A problem that a peer does not take, or a tensor that is not what it takes."""


class Absent(ValueError):
    """A peer that is not installed here."""


@dataclass(frozen=True)
class Problem:
    """Packed tensors of a page. inputs: by name, [1, T, heads, dims] with H or HV heads, or [HV, dims] of what heads have. Log
    decays, and inputs of one number for each token or head, are float32. ends: [N + 1] int32. heads: H and HV. dims: K and V.
    said: further arguments of a call, where inputs are those of a layer (`layer_inputs.py`); empty where they are the page's."""

    page: Algorithm
    inputs: dict[str, torch.Tensor]
    ends: torch.Tensor
    lengths: tuple[int, ...]
    heads: tuple[int, int]
    dims: tuple[int, int]
    dtype: torch.dtype
    said: Mapping[str, Any] = field(default_factory=dict)

    @property
    def sizes(self) -> dict[str, int]:
        """Extents by the names that Peer.takes uses."""
        tokens, n = sum(self.lengths), len(self.lengths)
        return {"T": tokens, "2 T": 2 * tokens, "H": self.heads[0], "HV": self.heads[1], "K": self.dims[0], "V": self.dims[1],
                "N": n, "N + 1": n + 1}

    @property
    def numbers(self) -> dict[str, float]:
        """The numbers of the caller by name: the page's defaults, 1 without one."""
        found = self.page.scalar_defaults({"C": 64, "K": self.dims[0], "V": self.dims[1]})
        return {n: 1.0 if x is None else x for n, x in found.items()}


@dataclass(frozen=True)
class Peer:
    """takes: argument -> dtype ("input" is the problem's) and shape. dtypes: of problems. packed: several sequences; groups: more
    value heads than heads; once: one shape a process, since it keeps its first. note: what a reader of a row must know. hint:
    what to install where it is not here; its distributions without one. of_layers: whether it takes the inputs of layers."""

    name: str
    module: str
    distributions: tuple[str, ...]
    takes: dict[str, tuple[str, str]]
    start: Callable[[Problem, Callable[..., None]], Run]
    dtypes: tuple[str, ...] = ("float16", "bfloat16")
    head_dims: tuple[int, ...] = (128,)
    packed: bool = True
    groups: bool = True
    once: bool = False
    note: str = ""
    hint: str = ""
    of_layers: bool = False
    served: list[tuple[int, ...]] = field(default_factory=list, compare=False)

    @property
    def version(self) -> str:
        """The version that is installed, of the first distribution found."""
        for name in self.distributions:
            try:
                return importlib.metadata.version(name)
            except importlib.metadata.PackageNotFoundError:
                continue
        return "unknown version"

    def refusal(self, x: Problem) -> str:
        """Why this peer does not take the problem; "" if it does."""
        dtype, sizes = _name(x.dtype), x.sizes
        if x.said and not self.of_layers:
            return f"layer_inputs: got inputs of a layer; {self.name} accepts those of the page"
        if dtype not in self.dtypes:
            return f"dtype: got {dtype}; {self.name} accepts {', '.join(self.dtypes)}"
        if not {sizes["K"], sizes["V"]} <= set(self.head_dims):
            return f"K, V: got {sizes['K']}, {sizes['V']}; {self.name} accepts {', '.join(map(str, self.head_dims))}"
        if not self.packed and sizes["N"] > 1:
            return f"sequences: got {sizes['N']}; {self.name} accepts one"
        if not self.groups and sizes["H"] != sizes["HV"]:
            return f"heads: got {sizes['H']}/{sizes['HV']}; {self.name} accepts as many value heads as heads"
        shape = (sizes["T"], sizes["H"], sizes["HV"])
        if self.once and any(s != shape for s in self.served):
            return f"shape: {self.name} keeps its first shape of a process; run this one alone with --only"
        return ""

    def check(self, dtype: torch.dtype, sizes: dict[str, int], **passed: torch.Tensor) -> None:
        """Raises Refused unless the tensors are what this peer states that it takes."""
        if set(passed) != set(self.takes) - ({"cu_seqlens"} - set(passed)):
            raise Refused(f"{self.name}: passed {', '.join(passed)}; it takes {', '.join(self.takes)}")
        for n, x in passed.items():
            want, dims = self.takes[n]
            shape = tuple(1 if d == "1" else sizes[d] for d in dims.split(", "))
            want = _name(dtype) if want == "input" else want
            if _name(x.dtype) != want or tuple(x.shape) != shape or not x.is_contiguous():
                how = "" if x.is_contiguous() else ", not contiguous"
                raise Refused(f"{self.name}: {n}: got {_name(x.dtype)} {list(x.shape)}{how}; it takes contiguous {want} "
                              f"{list(shape)} = [{dims}]")

    def absence(self) -> str:
        """Why this peer does not run here; "" if it does."""
        try:
            importlib.import_module(self.module)
        except ImportError as e:
            return f"{self.name} is absent: {e} ({self.hint or ' or '.join(self.distributions)})"
        return ""

    def prepare(self, x: Problem) -> Run:
        """A function that calls the peer on the problem. Conversions of the tensors are done before."""
        if absence := self.absence():
            raise Absent(absence)
        refused = self.refusal(x)
        if refused:
            raise Refused(refused)
        run = self.start(x, lambda **passed: self.check(x.dtype, x.sizes, **passed))
        self.served.append((x.sizes["T"], x.sizes["H"], x.sizes["HV"]))
        return run


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


TOKENS = {"q": ("input", "1, T, H, K"), "k": ("input", "1, T, H, K"), "v": ("input", "1, T, HV, V")}
GATES = {"g": ("float32", "1, T, HV"), "beta": ("float32", "1, T, HV")}


def _flashqla(x: Problem, check: Callable[..., None]) -> Run:
    """FlashQLA's forward pass, or its differentiable op where an input requires a gradient."""
    module, given = importlib.import_module("flash_qla"), dict[str, Any](x.inputs)
    rest = {"cu_seqlens": x.ends} if len(x.lengths) > 1 else {}
    check(**given, **rest)
    if any(t.requires_grad for t in given.values()):
        return lambda: module.chunk_gated_delta_rule(*given.values(), **x.numbers, output_final_state=True, **rest)
    op = module.chunk_gated_delta_rule_fwd

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        results = op(*given.values(), **x.numbers, output_final_state=True, **rest)
        return results[2], results[4]
    return run


def _tileops(x: Problem, check: Callable[..., None]) -> Run:
    op = importlib.import_module("tileops.ops").GatedDeltaNetPrefillBTHDFwdOp(chunk_size=64)
    q, k, v, g, beta = x.inputs.values()
    # it takes no scale
    given = dict(q=(q.float() * x.numbers["scale"]).to(x.dtype), k=k, v=v, g=g.to(x.dtype), beta=beta.to(x.dtype))
    check(**given)
    return lambda: op(*given.values())


def _flashinfer(x: Problem, check: Callable[..., None]) -> Run:
    """FlashInfer's kernels for Hopper: without a batch dim, decay as exp(g), states [N, HV, V, K]."""
    package = "flashinfer.gdn_kernels.delta_rule_dsl"
    parts = importlib.import_module(f"{package}.delta_rule_cp_sm90").cp_delta_rule_dsl_sm90
    whole = importlib.import_module(f"{package}.delta_rule_sm90").delta_rule_prefill_dsl_sm90
    q, k, v, g, beta = (t[0].contiguous() for t in x.inputs.values())
    alpha, scale = g.exp(), x.numbers["scale"]
    check(q=q, k=k, v=v, alpha=alpha, beta=beta, cu_seqlens=x.ends)
    s = x.sizes
    o, state = torch.empty_like(v), torch.empty(s["N"], s["HV"], s["V"], s["K"], device=v.device)
    # as its own dispatch does: parts where whole sequences fill less than half the device
    in_parts = s["N"] * s["HV"] < torch.cuda.get_device_properties(v.device).multi_processor_count / 2

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        if in_parts:
            parts(o, state, q, k, v, alpha, beta, x.ends, scale, max_seqlen=max(x.lengths))
        else:
            whole(o, state, q, k, v, None, alpha, beta, x.ends, scale)
        return o[None], state.transpose(-1, -2)
    return run


def _cudnn(x: Problem, check: Callable[..., None]) -> Run:
    """The op of cuDNN's frontend, without a batch dim and with states [N, HV, V, K]. It chooses its kernels by the GPU: on Hopper
    `kda_hopper_cuda`, which cuts sequences where a check of the gates allows it."""
    op = importlib.import_module("cudnn.linear_attention.ops").kimi_delta_attention
    if x.inputs["beta"].max() > 1:
        raise Refused("beta: got above 1; cudnn accepts up to 1, which its check of the gates assumes")
    given = {n: t[0].contiguous() for n, t in x.inputs.items()}
    check(**given, cu_seqlens=x.ends)

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        o, state = op(**given, cu_seqlens=x.ends, **x.numbers, output_final_state=True)
        return o[None], state.transpose(-1, -2)
    return run


#: The peers of a page that take it in ways of their own. FLA is among the peers of most pages (`peer_ops.py`).
OF_GDN = (
    Peer("flashqla", "flash_qla", ("flash_qla", "flash-qla"), {**TOKENS, **GATES, "cu_seqlens": ("int32", "N + 1")}, _flashqla),
    Peer("tileops", "tileops", ("tileops",), {**TOKENS, "g": ("input", "1, T, HV"), "beta": ("input", "1, T, HV")}, _tileops,
         dtypes=("float16",), packed=False, groups=False, once=True, note="gates in float16 only"),
    Peer("flashinfer", "flashinfer", ("flashinfer-python",),
         {"q": ("input", "T, H, K"), "k": ("input", "T, H, K"), "v": ("input", "T, HV, V"), "alpha": ("float32", "T, HV"),
          "beta": ("float32", "T, HV"), "cu_seqlens": ("int32", "N + 1")}, _flashinfer, note="decay as exp(g)"))
OF_KDA = (
    Peer("cudnn", "cudnn.linear_attention.ops", ("nvidia-cudnn-frontend",),
         {"q": ("input", "T, H, K"), "k": ("input", "T, H, K"), "v": ("input", "T, HV, V"), "g": ("float32", "T, HV, K"),
          "beta": ("float32", "T, HV"), "cu_seqlens": ("int32", "N + 1")}, _cudnn, dtypes=("bfloat16",)),)
BY_PAGE = {"gated_delta_rule": OF_GDN, "kimi_delta_attention": OF_KDA}
