"""FLA's tests/ops/test_gdn.py (flash-linear-attention bc3b101)."""
from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

from suite import DEVICE, absent, chunk, package, recurrent, without_gradients

ENV, PATHS = "SUITE_FLA", ("tests/ops/test_gdn.py",)
WORDS = ("--noconftest",)
#: Beside these, comparisons of gradients are left out: tests/family has ours.
DIFFERENT = {
    r"test_gate\b": "FLA's own kernel of the gate alone",
    r"test_prepare_wy_repr_bwd": "a step of FLA's backward pass",
    r"test_flash_qla": "FLA's dispatch to FlashQLA",
    r"blackwell_triton_guard": "autotuning of FLA's kernels"}


def _named(fn: Any) -> Any:
    """FLA warns of its older name of `state_v_first`, and its test asks for the warning."""
    def call(*args: Any, **options: Any) -> Any:
        if "transpose_state_layout" in options:
            warnings.warn("transpose_state_layout is state_v_first", DeprecationWarning, stacklevel=2)
        return fn(*args, **options)
    return call


def prepare(root: Path) -> None:
    os.environ["FLA_DISABLE_BACKEND_DISPATCH"] = "1"  # otherwise tests with HV unlike H skip themselves
    package("fla", root / "fla", __version__="0")
    package("fla.ops", root / "fla/ops")
    rule = root / "fla/ops/gated_delta_rule"
    package("fla.ops.gated_delta_rule", rule, chunk_gated_delta_rule=_named(chunk),
            fused_recurrent_gated_delta_rule=_named(recurrent))
    package("fla.ops.gated_delta_rule.wy_fast", prepare_wy_repr_bwd=absent("prepare_wy_repr_bwd"),
            recompute_w_u_fwd=absent("recompute_w_u_fwd"))


def adapt(module: Any) -> None:
    module.device = DEVICE
    module.assert_close = without_gradients(module.assert_close)
