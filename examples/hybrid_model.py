"""A small hybrid language model, for train_lm.py: three layers of Gated DeltaNet, then one of softmax attention, and again.

Layers are those of Qwen3-Next: a short causal convolution of q, k and v with SiLU; a log decay of -exp(A_log) softplus(a +
dt_bias); beta after a sigmoid; q and k divided by their L2 norms; a gated RMS norm of the output. Attention has rotary positions,
norms of q and k, and an output gate. An MLP follows each. The embedding is also the output matrix. Tokens are bytes.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gdn_codegen import chunk_gated_delta_rule

VOCABULARY = 256  # bytes
EVERY = 4  # of so many layers, one is attention
CONVOLUTION = 4  # tokens that the short convolution sees

#: What a layer calls: q, k [B, T, H, K], v [B, T, HV, V], raw gates and raw beta [B, T, HV], A_log and dt_bias [HV]. It returns
#: [B, T, HV, V].
Op = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Sizes:
    """layers: a multiple of 4. heads: of keys; there are two value heads to each, as in Qwen3-Next. head_dim: K and V."""

    layers: int = 4
    dim: int = 64
    heads: int = 2
    head_dim: int = 16

    def __post_init__(self) -> None:
        if self.layers % EVERY:
            raise ValueError(f"layers: got {self.layers}; accepted: a multiple of {EVERY}, as one layer in {EVERY} is attention")
        if self.head_dim % 2:
            raise ValueError(f"head_dim: got {self.head_dim}; accepted: an even number, as rotary positions turn pairs")


def reference(q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor,
              dtype: torch.dtype = torch.float32) -> Tensor:
    """The recurrence, token by token, in plain torch: an `Op`. S = exp(g) S; S = S + beta k (v - k S); o = q S. dtype: of all
    values between, also under autocast, which would round operands of products."""
    with torch.autocast(v.device.type, enabled=False):
        return _recurrence(q, k, v, a, b, A_log, dt_bias, dtype)


def _recurrence(q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, dtype: torch.dtype
                ) -> Tensor:
    """`reference` without autocast."""
    groups, given = v.shape[2] // q.shape[2], v.dtype
    q, k, v, a, b, A_log, dt_bias = (x.to(dtype) for x in (q, k, v, a, b, A_log, dt_bias))
    q, k = (x.repeat_interleave(groups, 2) for x in (q, k))
    q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    decay = torch.exp(-A_log.exp() * F.softplus(a + dt_bias))
    beta, q = b.sigmoid(), q * q.shape[-1] ** -0.5
    S, o = v.new_zeros(*k.shape[:1], *k.shape[2:], v.shape[-1]), []
    for t in range(v.shape[1]):
        S = decay[:, t, :, None, None] * S
        u = beta[:, t, :, None] * (v[:, t] - torch.einsum("bhk,bhkv->bhv", k[:, t], S))
        S = S + k[:, t, :, :, None] * u[:, :, None]
        o.append(torch.einsum("bhk,bhkv->bhv", q[:, t], S))
    return torch.stack(o, 1).to(given)


def generated(target: str) -> Op:
    """The package's op for one target, as an `Op`."""
    def op(q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor) -> Tensor:
        return chunk_gated_delta_rule(q, k, v, a, b, gate="raw", A_log=A_log, dt_bias=dt_bias, beta_form="sigmoid",
                                      use_qk_l2norm_in_kernel=True, target=target)[0]
    return op


class GatedDeltaNet(nn.Module):
    """A linear layer."""

    def __init__(self, s: Sizes, op: Op):
        """A_log and dt_bias start as in Mamba-2 and in FLA's layer: steps of 0.001 to 0.1, rates of up to 16."""
        super().__init__()
        HV, self.head_dim, self.op = 2 * s.heads, s.head_dim, op
        keys, values = s.heads * s.head_dim, HV * s.head_dim
        self.splits = (keys, keys, values)
        self.qkv = nn.Linear(s.dim, sum(self.splits), bias=False)
        self.z, self.a, self.b = (nn.Linear(s.dim, n, bias=False) for n in (values, HV, HV))
        self.conv = nn.Conv1d(sum(self.splits), sum(self.splits), CONVOLUTION, groups=sum(self.splits), padding=CONVOLUTION - 1,
                              bias=False)
        step = torch.exp(torch.empty(HV).uniform_(-6.9, -2.3))
        self.dt_bias = nn.Parameter(step + torch.log(-torch.expm1(-step)))  # the inverse of softplus
        self.A_log = nn.Parameter(torch.empty(HV).uniform_(0.01, 16).log())
        self.norm = nn.RMSNorm(s.head_dim, eps=1e-6)
        self.out = nn.Linear(values, s.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        T = x.shape[1]
        mixed = F.silu(self.conv(self.qkv(x).transpose(1, 2))[..., :T]).transpose(1, 2)
        q, k, v = (y.unflatten(-1, (-1, self.head_dim)).contiguous() for y in mixed.split(self.splits, -1))
        o = self.op(q, k, v, self.a(x), self.b(x), self.A_log, self.dt_bias)
        z = self.z(x).unflatten(-1, (-1, self.head_dim))
        return self.out((self.norm(o.float()) * F.silu(z)).flatten(2))


class Attention(nn.Module):
    """Causal softmax attention with rotary positions and an output gate."""

    def __init__(self, s: Sizes):
        super().__init__()
        self.head_dim, inner = s.head_dim, 2 * s.heads * s.head_dim
        self.q, self.k, self.v, self.gate = (nn.Linear(s.dim, inner, bias=False) for _ in range(4))
        self.q_norm, self.k_norm = (nn.RMSNorm(s.head_dim, eps=1e-6) for _ in range(2))
        self.out = nn.Linear(inner, s.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, self.head_dim)) for f in (self.q, self.k, self.v))
        q, k = (_rotated(norm(y.float())).to(v.dtype) for norm, y in ((self.q_norm, q), (self.k_norm, k)))
        o = F.scaled_dot_product_attention(*(y.transpose(1, 2) for y in (q, k, v)), is_causal=True)
        return self.out(o.transpose(1, 2).flatten(2) * torch.sigmoid(self.gate(x)))


def _rotated(x: Tensor) -> Tensor:
    """Rotary positions of rows [B, T, heads, dim]."""
    T, half = x.shape[1], x.shape[3] // 2
    rates = 10000.0 ** (-torch.arange(half, device=x.device) / half)
    angles = torch.outer(torch.arange(T, device=x.device), rates)[:, None]
    left, right = x.chunk(2, -1)
    return torch.cat([left * angles.cos() - right * angles.sin(), left * angles.sin() + right * angles.cos()], -1)


class MLP(nn.Module):
    """The gated MLP of such models, three times as wide inside."""

    def __init__(self, dim: int):
        super().__init__()
        self.up, self.gate = (nn.Linear(dim, 3 * dim, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Layer(nn.Module):
    """A mixer of tokens and an MLP, each after a norm and beside a residual."""

    def __init__(self, dim: int, mixer: nn.Module):
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(dim, eps=1e-6) for _ in range(2))
        self.mixer, self.mlp = mixer, MLP(dim)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mixer(self.norms[0](x))
        return x + self.mlp(self.norms[1](x))


class Model(nn.Module):
    """Bytes [B, T] -> logits [B, T, 256]. Parameters depend on torch's seed, not on the op."""

    def __init__(self, s: Sizes, op: Op):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, s.dim)
        nn.init.normal_(self.embedding.weight, std=0.02)
        mixers = (GatedDeltaNet(s, op) if i % EVERY else Attention(s) for i in range(1, s.layers + 1))
        self.layers = nn.ModuleList(Layer(s.dim, mixer) for mixer in mixers)
        self.norm = nn.RMSNorm(s.dim, eps=1e-6)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return F.linear(self.norm(x), self.embedding.weight)
