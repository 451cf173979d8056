"""gdn_codegen: Gated DeltaNet kernels for Triton, TileLang and Ascend PTO, from one algorithm."""
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .ops import (
        chunk_gated_delta_rule,
        chunk_gated_delta_rule_npu,
        fused_recurrent_gated_delta_rule,
        recurrent_gated_delta_rule,
    )

__version__ = "0.1.0"
__all__ = ["chunk_gated_delta_rule", "chunk_gated_delta_rule_npu", "fused_recurrent_gated_delta_rule",
           "recurrent_gated_delta_rule"]


def __getattr__(name: str) -> Any:
    """The ops, imported when one is first asked for: they need torch, and the command line's help does not."""
    if name not in (*__all__, "ops"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module
    ops = import_module(".ops", __name__)
    globals().update({n: getattr(ops, n) for n in __all__}, ops=ops)
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "ops"})
