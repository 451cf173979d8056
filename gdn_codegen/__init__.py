"""gdn_codegen: Gated DeltaNet kernels for Triton, TileLang and Ascend PTO, from one algorithm."""
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .channels import (
        chunk_gdn2,
        chunk_gla,
        chunk_kda,
        chunk_rwkv7,
        fused_mul_recurrent_rwkv7,
        fused_recurrent_gdn2,
        fused_recurrent_gla,
        fused_recurrent_kda,
        fused_recurrent_rwkv7,
    )
    from .convolution import causal_conv1d, causal_conv1d_fn, causal_conv1d_update
    from .family import (
        chunk_delta_rule,
        chunk_gated_delta_product,
        chunk_lightning_attn,
        chunk_simple_gla,
        fused_recurrent_delta_rule,
        fused_recurrent_gated_delta_product,
        fused_recurrent_lightning_attn,
        fused_recurrent_simple_gla,
    )
    from .mamba import mamba_chunk_scan_combined, selective_state_update
    from .ops import (
        chunk_gated_delta_rule,
        chunk_gated_delta_rule_npu,
        fused_recurrent_gated_delta_rule,
        recurrent_gated_delta_rule,
    )

__version__ = "0.2.0"
#: The ops of each module.
_OPS = {"ops": ("chunk_gated_delta_rule", "chunk_gated_delta_rule_npu", "fused_recurrent_gated_delta_rule",
                "recurrent_gated_delta_rule"),
        "family": ("chunk_delta_rule", "chunk_gated_delta_product", "chunk_lightning_attn", "chunk_simple_gla",
                   "fused_recurrent_delta_rule", "fused_recurrent_gated_delta_product", "fused_recurrent_lightning_attn",
                   "fused_recurrent_simple_gla"),
        "channels": ("chunk_gdn2", "chunk_gla", "chunk_kda", "chunk_rwkv7", "fused_mul_recurrent_rwkv7", "fused_recurrent_gdn2",
                     "fused_recurrent_gla", "fused_recurrent_kda", "fused_recurrent_rwkv7"),
        "convolution": ("causal_conv1d", "causal_conv1d_fn", "causal_conv1d_update"),
        "mamba": ("mamba_chunk_scan_combined", "selective_state_update")}
__all__ = ["causal_conv1d", "causal_conv1d_fn", "causal_conv1d_update", "chunk_delta_rule", "chunk_gated_delta_product",
           "chunk_gated_delta_rule", "chunk_gated_delta_rule_npu", "chunk_gdn2", "chunk_gla", "chunk_kda", "chunk_lightning_attn",
           "chunk_rwkv7", "chunk_simple_gla", "fused_mul_recurrent_rwkv7", "fused_recurrent_delta_rule",
           "fused_recurrent_gated_delta_product", "fused_recurrent_gated_delta_rule", "fused_recurrent_gdn2",
           "fused_recurrent_gla", "fused_recurrent_kda", "fused_recurrent_lightning_attn", "fused_recurrent_rwkv7",
           "fused_recurrent_simple_gla", "mamba_chunk_scan_combined", "recurrent_gated_delta_rule", "selective_state_update"]


def __getattr__(name: str) -> Any:
    """The ops, imported when one is first asked for: they need torch, and the command line's help does not."""
    if name not in (*__all__, *_OPS):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module
    for module, ops in _OPS.items():
        found = import_module(f".{module}", __name__)
        globals().update({n: getattr(found, n) for n in ops}, **{module: found})
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_OPS})
