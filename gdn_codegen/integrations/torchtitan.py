"""torchtitan: the Gated DeltaNet of Qwen3.5, in its trainer and in its generator on vLLM.

    import gdn_codegen.integrations.torchtitan

Read at commit b5bcd76c of pytorch/torchtitan (2026-08-21): torchtitan/models/qwen3_5/gdn.py, class GatedDeltaKernel and the op
torchtitan::recurrent_gdn_fwd; torchtitan/experiments/rl/models/gdn.py, class VLLMInnerGatedDeltaNet. In torchtitan 0.3.0 class
GatedDeltaKernel is in torchtitan/models/qwen3_5/model.py. They call FLA's functions.
"""
from __future__ import annotations

import importlib
from typing import Any

from ..ops import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
from ..runtime.gradient_library import Differentiated
from .names import Names

_NAMES = Names("torchtitan")


def _recurrent(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
    """FLA's function. In torchtitan's batch-invariant mode a trainer's pack and a generator's steps have to give the same bits:
    then ours is asked for that, and walks token by token in both."""
    from torchtitan.distributed.utils import is_in_batch_invariant_mode
    return fused_recurrent_gated_delta_rule(*args, **kwargs, batch_invariant=is_in_batch_invariant_mode() or None)


_OPS = {"_fla_chunk_gated_delta_rule": chunk_gated_delta_rule, "_fla_fused_recurrent_gated_delta_rule": _recurrent}
#: By module and name.
FUNCTIONS = {"torchtitan.models.qwen3_5.gdn": _OPS, "torchtitan.models.qwen3_5.model": _OPS,
             "torchtitan.experiments.rl.models.gdn": _OPS}


def enable() -> list[str]:
    """Replace the functions; the names that are replaced. ImportError if this torchtitan has none of them."""
    names = _NAMES.replace(FUNCTIONS, "torchtitan 0.3.0, or commit b5bcd76c of pytorch/torchtitan")
    try:  # local values alone pass through this function of autograd; torchtitan says so of FLA's
        importlib.import_module("spmd_types").register_local_autograd_function(Differentiated)
    except BaseException:
        disable()
        raise
    return names


def disable() -> None:
    """Give the functions back."""
    _NAMES.restore()


enable()
