"""Plug-in for transformers (5.23.0 was read): its models' layers call our ops.

    from gdn_codegen.integrations import transformers as plugin
    plugin.enable(model)

A layer of this family calls functions of its own module, each of which is registered under the name of a kernel, such as
chunk_gated_delta_rule (`use_kernel_func_from_hub_with_fallback` in integrations/hub_kernels.py). `enable` finds layers by these
names, and puts ours in the place of the functions. Layers, caches and generation stay as they are.
"""
from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers.activations import ACT2FN
from transformers.utils.kernel_config import KernelConfig

from ..channels import chunk_kda, fused_recurrent_kda
from ..mamba import ends_of, mamba_chunk_scan_combined, selective_state_update
from ..ops import chunk_gated_delta_rule, recurrent_gated_delta_rule
from .calls import falling_back

HOST = "transformers"
State = Tensor | None


def _ends(kwargs: dict[str, Any]) -> State:
    """Where packed sequences end, by either of the names under which layers pass it."""
    ends: State = kwargs.get("cu_seqlens")
    return kwargs.get("cu_seq_lens_q") if ends is None else ends


def _packed(kwargs: dict[str, Any]) -> dict[str, Any]:
    """What tells a delta rule's op of packed sequences, and how long the longest is. Of seq_idx alone it makes their ends, and
    waits for the device."""
    ends, numbers = _ends(kwargs), kwargs.get("seq_idx")
    if ends is None and numbers is not None:
        if len(numbers) > 1:
            return {"seq_idx": numbers}  # the op refuses it
        ends = ends_of(numbers)
    return {} if ends is None else {"cu_seqlens": ends, "max_length_q": kwargs.get("max_length_q")}


def _numbers(ends: Tensor, tokens: int) -> Tensor:
    """The number of each token's sequence, int32 [1, tokens]."""
    at = torch.arange(tokens, device=ends.device, dtype=ends.dtype)
    return torch.searchsorted(ends[1:], at, right=True, out_int32=True)[None]


def _prompts(op: Callable[..., Any]) -> Callable[..., Any]:
    """The host's function for prompts with a delta rule. Layers pass on what a model was called with, of which only what is
    said of packed sequences counts here. Chunks are the package's choice."""
    def prompts(query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, chunk_size: int = 64,
                initial_state: State = None, output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False, *,
                target: str = "auto", **kwargs: Any) -> Any:
        return op(query, key, value, g, beta, initial_state=initial_state, output_final_state=output_final_state,
                  use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, target=target, **_packed(kwargs))
    return prompts


def _step(op: Callable[..., Any]) -> Callable[..., Any]:
    """The host's function for one token after others. Without gradients the state is written where it was, in the layer's cache,
    to which the layer would copy it."""
    def step(query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, initial_state: State = None,
             output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False, *, target: str = "auto",
             **kwargs: Any) -> Any:
        in_place = output_final_state and initial_state is not None and not torch.is_grad_enabled()
        return op(query, key, value, g, beta, initial_state=initial_state, output_final_state=output_final_state,
                  final_state=initial_state if in_place else None, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
                  target=target, **_packed(kwargs))
    return step


def _scan(hidden_states: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, chunk_size: int, D: State = None,
          dt_bias: State = None, initial_states: State = None, dt_softplus: bool = False,
          dt_limit: tuple[float, float] = (0.0, inf), return_final_states: bool = False, *, target: str = "auto",
          **kwargs: Any) -> Any:
    """The host's function for prompts of Mamba-2."""
    ends, numbers = _ends(kwargs), kwargs.get("seq_idx")
    if numbers is None and ends is not None:
        numbers = _numbers(ends, hidden_states.shape[1])
    return mamba_chunk_scan_combined(hidden_states, dt, A, B, C, chunk_size, D, kwargs.get("z"), dt_bias, initial_states, numbers,
                                     ends, dt_softplus, dt_limit, return_final_states, target=target)


def _update(state: Tensor, hidden_states: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: State = None,
            dt_bias: State = None, dt_softplus: bool = False, z: State = None, *, target: str = "auto", **kwargs: Any) -> Any:
    """The host's function for one token of Mamba-2, which updates the state in place."""
    return selective_state_update(state, hidden_states, dt, A, B, C, D, z, dt_bias, dt_softplus, target=target)


#: Ours by the kernels' names. A layer is of this family if it calls one of the functions for prompts, which come first.
OURS: dict[str, Callable[..., Any]] = {
    "chunk_gated_delta_rule": _prompts(chunk_gated_delta_rule), "chunk_kda": _prompts(chunk_kda),
    "mamba_chunk_scan_combined": _scan,
    "fused_recurrent_gated_delta_rule": _step(recurrent_gated_delta_rule), "fused_recurrent_kda": _step(fused_recurrent_kda),
    "selective_state_update": _update}
PROMPTS = frozenset(list(OURS)[:3])


def _unfused(*args: Any, **kwargs: Any) -> None:
    """mamba_split_conv1d_scan_combined, a whole layer: None tells the layer to call the functions for its parts, as here it is
    told where mamba-ssm is not installed."""


def _convolution(theirs: Callable[..., Any]) -> Callable[..., Any]:
    """causal_conv1d_fn, which keeps packed sequences apart. The host's own does so only with another package's kernel, and only
    if the model was called with seq_idx."""
    def causal_conv1d_fn(hidden_states: Tensor, weight: Tensor, bias: State = None, activation: str | None = None,
                         **kwargs: Any) -> Any:
        """The host's function if there is one sequence or its kernel takes several, else `_convolved`."""
        ends, numbers = _ends(kwargs), kwargs.get("seq_idx")
        if numbers is None:
            if ends is None or len(ends) == 2:  # one sequence
                return theirs(hidden_states, weight, bias, activation=activation)
            numbers = _numbers(ends, hidden_states.shape[-1])
        before = hidden_states.shape[-1] - numbers.shape[1]  # tokens of the cache
        numbers = torch.cat([numbers[:, :1].expand(-1, before), numbers], 1)
        try:
            return theirs(hidden_states, weight, bias, activation=activation, seq_idx=numbers)
        except ValueError:  # the host's code in torch takes no packed sequences
            return _convolved(hidden_states, weight, bias, activation, numbers)
    return causal_conv1d_fn


def _convolved(x: Tensor, weight: Tensor, bias: State, activation: str | None, numbers: Tensor) -> Tensor:
    """The causal convolution of each channel, within sequences.

    x: [B, D, T]; weight: [D, width]; bias: [D]; numbers: [B, T], the number of each token's sequence. Sums are float32.
    """
    tokens, width = x.shape[-1], weight.shape[-1]
    out = torch.zeros_like(x, dtype=torch.float32) if bias is None else bias.float()[:, None].expand_as(x)
    for back in range(width):
        same = pad(numbers, (back, 0), value=-1)[:, :tokens] == numbers
        out = out + pad(x, (back, 0))[..., :tokens] * same[:, None] * weight[:, width - 1 - back, None].float()
    return (out if activation is None else ACT2FN[activation](out)).to(x.dtype)


#: The host's functions that ours replace, by their modules' and their own names.
_theirs: dict[tuple[str, str], Callable[..., Any]] = {}


def _kernel(function: Any) -> str:
    """The name of the kernel under which the host has registered a function; "" for others."""
    if (name := getattr(function, "kernel_layer_name", None)) is not None:  # with the package `kernels` it is a module of torch
        return str(name)
    code = getattr(function, "__code__", None)
    if code is None or "func_name" not in code.co_freevars:
        return ""
    return str(function.__closure__[code.co_freevars.index("func_name")].cell_contents)


def _called(layer: type[nn.Module]) -> dict[tuple[str, str], str]:
    """The registered functions that a class's forward calls, by their modules' and their own names: the kernels' names."""
    forward = inspect.unwrap(layer.forward)
    space = getattr(forward, "__globals__", {})
    found = {(space["__name__"], n): space[n] for n in forward.__code__.co_names if n in space} if space else {}
    kernels = {at: _kernel(_theirs.get(at, f)) for at, f in found.items()}
    return {at: name for at, name in kernels.items() if name}


def _functions(model: nn.Module) -> dict[tuple[str, str], str]:
    """What layers of this family call (`_called`)."""
    layers = (_called(t) for t in {type(m) for m in model.modules()})
    return {at: name for layer in layers if PROMPTS & set(layer.values()) for at, name in layer.items()}


def _replacement(kernel: str, theirs: Callable[..., Any], target: str) -> Callable[..., Any] | None:
    """What goes in the place of a function; None if it stays."""
    if kernel in OURS:
        return falling_back(HOST, kernel, partial(OURS[kernel], target=target), theirs)
    return {"mamba_split_conv1d_scan_combined": _unfused, "causal_conv1d_fn": _convolution(theirs)}.get(kernel)


def enable(model: nn.Module, target: str = "auto") -> None:
    """Let the layers of a model call our ops, for prompts, tokens after them, training and packed sequences.

    model: a model of transformers, or a module that contains one. Its layers share functions with other models of the same
    classes, so those call our ops, too. target: as of the ops. Call it again to choose another target.
    Raises ValueError for a model without layers of this family (docs/integrations.md#transformers).
    """
    functions = _functions(model)
    if not functions:
        raise ValueError(f"model: got {type(model).__name__}, none of whose layers calls a function of transformers for one of "
                         f"these kernels; accepted: a model with a layer that calls one: {', '.join(sorted(PROMPTS))}")
    for (module, name), kernel in functions.items():
        space = vars(sys.modules[module])
        theirs = _theirs.get((module, name), space[name])
        if ours := _replacement(kernel, theirs, target):
            _theirs[module, name] = theirs
            space[name] = ours


def disable(model: nn.Module) -> None:
    """Let the layers of a model, and those of other models of its classes, call the host's functions again."""
    for module, name in _functions(model):
        if theirs := _theirs.pop((module, name), None):
            vars(sys.modules[module])[name] = theirs


@dataclass(frozen=True)
class Repository:
    """One of our functions, as the package `kernels` asks for it (0.17.2: `RepositoryProtocol`). kernel: a name of OURS."""

    kernel: str

    def load(self) -> type[nn.Module]:
        """A class without a state, whose forward has the parameters of the host's function."""
        kernel, ours = self.kernel, OURS[self.kernel]

        def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            # self is the host's function, of which `kernels` replaces the method forward
            return falling_back(HOST, kernel, ours, partial(type(self).forward, self))(*args, **kwargs)

        taken = [p for p in inspect.signature(ours).parameters.values() if p.kind is not p.KEYWORD_ONLY]
        first = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        forward.__signature__ = inspect.Signature([first, *taken])  # type: ignore[attr-defined]
        return type(kernel, (nn.Module,), {"forward": forward, "can_torch_compile": True})


def kernel_mapping(devices: tuple[str, ...] = ("cpu", "cuda", "npu")) -> dict[str, dict[str, Repository]]:
    """Our functions by the kernels' names and devices, for the functions `use_kernel_mapping` and
    `register_kernel_mapping` of the package `kernels`."""
    return {name: dict.fromkeys(devices, Repository(name)) for name in OURS}


class GeneratedKernels(KernelConfig):  # type: ignore[misc,unused-ignore]
    """A KernelConfig with our functions beside those of its mapping, for `from_pretrained(kernel_config=...)` and a
    model's `set_use_kernels(True, ...)`."""

    def create_compatible_mapping(self, model: nn.Module, compile: bool = False) -> None:
        """Called by transformers, before it gives the mapping to the package `kernels`."""
        super().create_compatible_mapping(model, compile)  # type: ignore[no-untyped-call,unused-ignore]
        self.kernel_mapping |= kernel_mapping()
