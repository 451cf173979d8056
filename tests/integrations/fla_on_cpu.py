"""FLA on CPU tensors: stand-ins in torch for the Triton kernels of its layers, and its references of the ops in float64."""
from __future__ import annotations

import importlib
import re
import warnings
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from itertools import pairwise
from types import SimpleNamespace
from unittest import mock

import torch
import torch.nn.functional as F

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # that there is no GPU
    import fla.layers.simple_gla  # which fla.layers does not have
    from fla.models.utils import Cache
    from fla.modules import FusedRMSNormGated, RMSNorm, ShortConvolution
    from fla.ops.delta_rule.naive import delta_rule_recurrence
    from fla.ops.gated_delta_product.naive import naive_recurrent_gated_delta_product
    from fla.ops.gated_delta_rule.gate import naive_gdn_gate
    from fla.ops.gated_delta_rule.naive import naive_recurrent_gated_delta_rule
    from fla.ops.gdn2.naive import naive_recurrent_gdn2
    from fla.ops.generalized_delta_rule.dplr.naive import dplr_recurrence
    from fla.ops.gla.naive import naive_recurrent_gla
    from fla.ops.kda.gate import naive_kda_gate, naive_kda_lowerbound_gate
    from fla.ops.kda.naive import naive_recurrent_kda
    from fla.ops.rwkv7.fused_addcmul import torch_addcmul_rwkv7
    from fla.ops.rwkv7.fused_k_update import k_update_ref
    from fla.ops.rwkv7.gate_output_correction import gate_output_correction_ref
    from fla.ops.simple_gla.naive import naive_recurrent_simple_gla

SMALL = dict(hidden_size=64, head_dim=32, num_heads=2, layer_idx=0)
#: By the name of a layer's class: how it is made here.
LAYERS = {
    "GatedDeltaNet": dict(SMALL, expand_v=1, num_v_heads=4, allow_neg_eigval=True),
    "KimiDeltaAttention": dict(SMALL, num_v_heads=4, safe_gate=True, lower_bound=-5.0),
    "GatedLinearAttention": dict(hidden_size=64, num_heads=2, expand_k=1.0, layer_idx=0),
    "DeltaNet": dict(hidden_size=64, num_heads=2, layer_idx=0),
    "SimpleGatedLinearAttention": dict(hidden_size=64, num_heads=2, layer_idx=0),
    "GatedDeltaNet2": dict(SMALL, num_v_heads=4),
    "GatedDeltaProduct": dict(SMALL, expand_v=1),
    "RWKV7Attention": dict(hidden_size=64, head_dim=32, layer_idx=0, num_hidden_layers=2, decay_low_rank_dim=16,
                           gate_low_rank_dim=16, a_low_rank_dim=16, v_low_rank_dim=16),
}


def layer(name, seed=0, **sizes):
    """A layer with random weights, float32. sizes: other ones than in LAYERS."""
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = {**vars(fla.layers), **vars(fla.layers.simple_gla)}[name](**{**LAYERS[name], **sizes})
    for n, x in made.named_parameters():
        if x.ndim > 1 and "conv" not in n:
            torch.nn.init.normal_(x, std=x.shape[-1] ** -0.5)
    return made


# --- stand-ins ------------------------------------------------------------------------------------------------------------
def _convolution(self, x, residual=None, mask=None, cache=None, output_final_state=False, cu_seqlens=None, **_):
    """ShortConvolution.forward. The cache [N, D, W] has the last inputs."""
    if mask is not None:
        x = x * mask.unsqueeze(-1)
    ends = None if cu_seqlens is None else cu_seqlens.tolist()
    rows = list(x) if ends is None else [x[0, a:b] for a, b in pairwise(ends)]
    out, last = [], []
    for n, y in enumerate(rows):
        W = self.kernel_size[0]
        before = y.new_zeros(W, y.shape[1]) if cache is None else cache[n].T
        y = torch.cat([before, y])
        last.append(y[-W:].T)
        out.append(F.conv1d(y.T[None, :, 1:], self.weight, self.bias, groups=y.shape[1])[0].T)
    out = torch.stack(out) if ends is None else torch.cat(out)[None]
    return F.silu(out) if self.activation else out, torch.stack(last) if output_final_state else None


def _norm(self, x, *_, **__):
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)
    return y if self.weight is None else y * self.weight


def _gated_norm(self, x, g, *_, **__):
    return _norm(self, x) * (g.sigmoid() if self.activation == "sigmoid" else F.silu(g))


def _token_shift(x, cu_seqlens=None, cache=None, output_cache=False):
    before = torch.cat([torch.zeros_like(x[:, :1]) if cache is None else cache, x[:, :-1]], 1)
    return before - x, x[:, -1:]


STAND_INS = [(ShortConvolution, {"forward": _convolution}), (RMSNorm, {"forward": _norm}),
             (FusedRMSNormGated, {"forward": _gated_norm}),
             (fla.layers.GatedDeltaNet, {"_use_fused_qkv_conv": lambda *_, **__: False}),
             (importlib.import_module("fla.layers.rwkv7"), {
                 "token_shift": _token_shift, "fused_addcmul_rwkv7": torch_addcmul_rwkv7, "fused_k_rwkv7": k_update_ref,
                 "gate_output_correction": gate_output_correction_ref})]


@contextmanager
def on_cpu():
    """Inside, FLA's layers run on CPU tensors, but for their ops."""
    with ExitStack() as stack:
        for owner, names in STAND_INS:
            stack.enter_context(mock.patch.multiple(owner, **names))
        yield


# --- FLA's references of the ops, in float64 --------------------------------------------------------------------------------
def _dplr(q, k, v, a, b, gk, h, scale):
    q, k, v, a, b, gk = (x.transpose(1, 2) for x in (q, k, v, a, b, gk))
    o, S = dplr_recurrence(q * (scale * q.shape[-1] ** 0.5), k, v, a, b, gk, h)
    return o.transpose(1, 2), S


def _delta(q, k, v, beta, h, **_):
    o, S = delta_rule_recurrence(*(x.transpose(1, 2) for x in (q, k, v, beta)), h)
    return o.transpose(1, 2), S


def _gated_delta(q, k, v, beta, g, h, **_):
    q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], 2) for x in (q, k))
    g = v.new_zeros(v.shape[:3]) if g is None else g
    return naive_recurrent_gated_delta_rule(q, k, v, beta, g, initial_state=h, output_final_state=True)


def _product(q, k, v, g, beta, h, num_householder):
    return naive_recurrent_gated_delta_product(q, k, v, g, beta, q.shape[-1] ** -0.5, initial_state=h, output_final_state=True,
                                               num_householder=num_householder)


#: By the name of what a layer calls: FLA's recurrence, of q, k, ... and the state h [N, H, K, V].
NAIVE = {
    "gated_delta_rule": _gated_delta, "delta_rule": _delta, "gated_delta_product": _product,
    "kda": lambda q, k, v, g, beta, h: naive_recurrent_kda(q, k, v, g, beta, None, h, True),
    "gdn2": lambda q, k, v, g, b, w, h: naive_recurrent_gdn2(q, k, v, g, b, w, None, h, True),
    "gla": lambda q, k, v, h, g=None, gk=None: naive_recurrent_gla(q, k, v, gk if g is None else g, h, True),
    "simple_gla": lambda q, k, v, g, h: naive_recurrent_simple_gla(q, k, v, g, None, h, True),
    "rwkv7": lambda r, w, k, v, a, h, scale, b=None, kk=None: _dplr(
        r, k, v, *((a, b) if kk is None else (-kk, kk * a)), w, h, scale),
}
_MODULES = ["gated_delta_rule", "delta_rule", "gated_delta_product", "kda", "gdn2", "gla", "simple_gla",
            "generalized_delta_rule.dplr"]
_FORMS = ("use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel", "allow_neg_eigval", "A_log", "dt_bias",
          "lower_bound", "safe_gate", "state_v_first", "cu_seqlens", "initial_state", "output_final_state", "chunk_size")


def reference(member):
    """A function with the keywords that layers pass, in float64."""
    def call(**x):
        said = SimpleNamespace(**{n: x.pop(n, None) for n in _FORMS})
        if said.use_qk_l2norm_in_kernel:
            x.update({n: x[n] * torch.rsqrt(x[n].square().sum(-1, keepdim=True) + 1e-6) for n in "qk"})
        if said.use_gate_in_kernel:
            gate = naive_gdn_gate if member == "gated_delta_rule" else naive_kda_gate
            x["g"] = gate(x["g"], said.A_log, said.dt_bias, output_dtype=torch.float64) if said.lower_bound is None else \
                naive_kda_lowerbound_gate(x["g"], said.A_log, said.dt_bias, said.lower_bound, torch.float64)
        if said.use_beta_sigmoid_in_kernel:
            x["beta"] = x["beta"].sigmoid() * (2 if said.allow_neg_eigval else 1)
        turned = lambda h: h if h is None or not said.state_v_first else h.mT
        results = _by_sequence(member, x, said.cu_seqlens, turned(said.initial_state))
        return results[0], turned(results[1]) if said.output_final_state else None
    return call


def _by_sequence(member, x, cu_seqlens, h):
    if cu_seqlens is None:
        return NAIVE[member](**x, h=h)
    ends, steps = cu_seqlens.tolist(), x.get("num_householder", 1)
    cut = lambda n, y, a, b: y[:, a * (m := steps if n in ("k", "v", "beta") else 1):b * m] if isinstance(y, torch.Tensor) else y
    found = [NAIVE[member](**{n: cut(n, y, a, b) for n, y in x.items()}, h=None if h is None else h[i:i + 1])
             for i, (a, b) in enumerate(pairwise(ends))]
    return torch.cat([o for o, _ in found], 1), torch.cat([S for _, S in found])


class _Double:
    """The module torch, in which float32 is float64."""

    float = float32 = torch.float64

    def __getattr__(self, name):
        return getattr(torch, name)


@contextmanager
def in_float64():
    """Inside, what says float32 in FLA's references, and in layers, is float64."""
    with ExitStack() as stack:
        for name in _MODULES:
            stack.enter_context(mock.patch.object(importlib.import_module(f"fla.ops.{name}.naive"), "torch", _Double()))
        stack.enter_context(mock.patch.object(torch.Tensor, "float", torch.Tensor.double))
        yield


@contextmanager
def references(made):
    """Inside, the module of a layer calls FLA's references, in float64."""
    module = importlib.import_module(type(made).__module__)
    ops = {n: reference(found[2]) for n in vars(module) if (found := re.match(r"(chunk|fused(?:_mul)?_recurrent)_(\w+)", n))}
    with in_float64(), mock.patch.multiple(module, **ops):
        yield


# --- what is compared ---------------------------------------------------------------------------------------------------------
def step_of_training(made, x, **said):
    """The output, and the gradients of its product with itself shifted, by x and by the weights."""
    made.train()
    x = x.clone().requires_grad_()
    y = made(x, **said)[0]
    (y * torch.linspace(-1, 1, y.numel(), dtype=torch.float64).sin().to(y).view_as(y)).sum().backward()
    return {"y": y.detach(), "x": x.grad, **{n: p.grad for n, p in made.named_parameters() if p.grad is not None}}


@torch.no_grad()
def decoded(made, x, parts, mask=None):
    """Outputs of x [B, T, D], in parts of so many tokens, through FLA's cache; and the last recurrent state."""
    made.eval()
    cache, out, at = Cache(), [], 0
    for n in parts:
        seen = None if mask is None else mask[:, :at + n]
        out.append(made(x[:, at:at + n], attention_mask=seen, past_key_values=cache, use_cache=True)[0])
        at += n
    return {"y": torch.cat(out, 1), "S": cache[0]["recurrent_state"]}


def by_references(made, run, x, *args, **said):
    """What `run` gives of a copy of the layer in float64 on FLA's references."""
    made = deepcopy(made).double()
    with references(made):
        return run(made, x.double(), *args, **said)


def error(got, want):
    """RMSE over RMS."""
    return float((got.double() - want).square().mean().sqrt() / want.square().mean().sqrt().clamp(min=1e-300))
