"""gdn_codegen: Gated DeltaNet kernels for Triton, TileLang and Ascend PTO, from one algorithm."""
from .ops import (
    chunk_gated_delta_rule,
    chunk_gated_delta_rule_npu,
    fused_recurrent_gated_delta_rule,
    recurrent_gated_delta_rule,
)

__version__ = "0.1.0"
__all__ = ["chunk_gated_delta_rule", "chunk_gated_delta_rule_npu", "fused_recurrent_gated_delta_rule",
           "recurrent_gated_delta_rule"]
