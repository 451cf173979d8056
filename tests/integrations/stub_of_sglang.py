"""A package with the names, signatures and calls of SGLang's linear attention, and with hooks, for tests of its plug-in.

Its kernels raise an AssertionError that names the method. The versions are those of gdn_codegen/integrations/sglang.py.
"""
_LINEAR = "sglang/srt/layers/attention/linear"
_KERNEL = '''
from sglang.srt.layers.attention.linear.kernels.kernel_backend import LinearAttnKernelBase


class {0}(LinearAttnKernelBase):
    supports_packed_decode = True

    def packed_decode(self, mixed_qkv, a, b, *, A_log, dt_bias, scale, ssm_states, cache_indices, num_v_heads, head_v_dim,
                      **kwargs):
        raise AssertionError("packed_decode of {0} was called")

    def decode(self, q, k, v, a, b, *, A_log, dt_bias, ssm_states, cache_indices, query_start_loc, **kwargs):
        raise AssertionError("decode of {0} was called")

    def extend(self, q, k, v, g, beta, *, ssm_states, cache_indices, query_start_loc, {1}, **kwargs):
        raise AssertionError("extend of {0} was called")

    def target_verify(self, A_log, dt_bias, q, k, v, a, b, *, ssm_states, cache_indices, query_start_loc,
                      intermediate_states_buffer, intermediate_state_indices, cache_steps, retrieve_parent_token, **kwargs):
        raise AssertionError("target_verify of {0} was called")
'''
FILES = {
    "sglang/kernels/ops/attention/fla/chunk.py": "",
    "sglang/srt/utils.py": "is_cpu = is_npu = lambda: False\n",
    "sglang/srt/plugins/hook_registry.py": '''
import enum
import pkgutil
import sys


class HookType(enum.Enum):
    AROUND = "around"
    REPLACE = "replace"


class HookRegistry:
    hooks = {}

    @classmethod
    def register(cls, target, hook, hook_type=None, *, source=None):
        cls.hooks.setdefault(target, []).append((hook_type, hook))

    @classmethod
    def apply_hooks(cls):
        for target in sorted(cls.hooks, key=lambda t: not isinstance(cls.hooks[t][0][1], type)):
            for kind, hook in cls.hooks.pop(target):
                at, name = target.rsplit(".", 1)
                holder = pkgutil.resolve_name(at)
                theirs = getattr(holder, name)
                made = hook if isinstance(hook, type) else (lambda *a, _h=hook, _t=theirs, **k: _h(_t, *a, **k))
                assert kind is (HookType.REPLACE if isinstance(hook, type) else HookType.AROUND)
                setattr(holder, name, made)
                for m in list(sys.modules.values()):
                    for n in [n for n, x in vars(m).items() if x is theirs] if m is not None else []:
                        setattr(m, n, made)
''',
    f"{_LINEAR}/kernels/kernel_backend.py": '''
from abc import ABC, abstractmethod


class LinearAttnKernelBase(ABC):
    uses_state_checkpoints = False

    @abstractmethod
    def decode(self, q, k, v, a, b, *, A_log, dt_bias, ssm_states, cache_indices, query_start_loc, **kwargs): ...

    @abstractmethod
    def extend(self, q, k, v, g, beta, *, ssm_states, cache_indices, query_start_loc, **kwargs): ...
''',
    f"{_LINEAR}/kernels/gdn_triton.py": _KERNEL.format("TritonGDNKernel", "inplace_update=True"),
    f"{_LINEAR}/kernels/kda_triton.py": _KERNEL.format(
        "TritonKDAKernel", "A_log=None, dt_bias=None, lower_bound=None, beta_is_raw=False, return_intermediate_states=False"),
    f"{_LINEAR}/gdn_backend.py": '''
import torch

from sglang.srt.layers.attention.linear.kernels.gdn_triton import TritonGDNKernel


def fused_gdn_gating(A_log, a, b, dt_bias):
    g = -A_log.float().exp() * torch.nn.functional.softplus(a.float() + dt_bias)
    return g[None], b.float().sigmoid()[None]


class GDNAttnBackend:
    """The convolution is left out: mixed_qkv is its result."""

    def __init__(self, metadata):
        self.kernel, self.forward_metadata = TritonGDNKernel(), metadata

    def split(self, layer, mixed_qkv):
        parts = torch.split(mixed_qkv, [layer.q_dim, layer.k_dim, layer.v_dim], dim=-1)
        return [x.view(1, len(x), -1, n) for x, n in zip(parts, (layer.head_k_dim, layer.head_k_dim, layer.head_v_dim))]

    def forward_decode(self, layer, ssm_states, mixed_qkv, a, b, packed=True):
        m = self.forward_metadata
        if packed and self.kernel.supports_packed_decode:
            return self.kernel.packed_decode(
                mixed_qkv, a, b, A_log=layer.A_log, dt_bias=layer.dt_bias, scale=layer.head_k_dim ** -0.5, ssm_states=ssm_states,
                cache_indices=m.mamba_cache_indices, num_v_heads=layer.num_v_heads, head_v_dim=layer.head_v_dim,
                replayssm_d=m.replayssm, replayssm_k=m.replayssm, replayssm_g=m.replayssm, replayssm_write_pos=m.replayssm,
                replayssm_force_flush=None)
        q, k, v = self.split(layer, mixed_qkv)
        return self.kernel.decode(q, k, v, a, b, A_log=layer.A_log, dt_bias=layer.dt_bias, ssm_states=ssm_states,
                                  cache_indices=m.mamba_cache_indices, query_start_loc=m.query_start_loc)

    def forward_extend(self, layer, forward_batch, ssm_states, mixed_qkv, a, b):
        m, (q, k, v) = self.forward_metadata, self.split(layer, mixed_qkv)
        g, beta = fused_gdn_gating(layer.A_log, a, b, layer.dt_bias)
        o, _, h = self.kernel.extend(
            q=q, k=k, v=v, g=g, beta=beta, ssm_states=ssm_states, cache_indices=m.mamba_cache_indices,
            query_start_loc=m.query_start_loc, state_checkpoint_cu_starts=m.query_start_loc, num_state_checkpoints=3,
            state_checkpoint_every_n_tokens=64, chunk_indices=m.query_start_loc, output=torch.empty(1), layer_id=3,
            extend_prefix_lens=m.query_start_loc, track_state=None, track_chunk_idx=None)
        if m.has_mamba_track_mask:
            ssm_states[m.track_ssm_h_dst] = h.squeeze(0)[m.track_ssm_h_src].to(ssm_states.dtype, copy=False)
            ssm_states[m.track_ssm_final_dst] = ssm_states[m.track_ssm_final_src]
        self.h = h
        return o

    def forward_verify(self, layer, ssm_states, mixed_qkv, a, b, buffer, rows, steps):
        m, (q, k, v) = self.forward_metadata, self.split(layer, mixed_qkv)
        return self.kernel.target_verify(
            A_log=layer.A_log, dt_bias=layer.dt_bias, q=q, k=k, v=v, a=a, b=b, ssm_states=ssm_states,
            cache_indices=m.mamba_cache_indices, query_start_loc=m.query_start_loc, intermediate_states_buffer=buffer,
            intermediate_state_indices=rows, cache_steps=steps, retrieve_parent_token=m.retrieve_parent_token, stable_rows=True)
'''}
