"""FLA's tests of the ops that its plug-in serves (flash-linear-attention bc3b101), in both directions, through FLA's functions.

The checkout's package fla is used, or, where the folder has none, the one that is installed.
"""
from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any

import torch
from suite import DEVICE

ENV = "SUITE_FLA_PLUGIN"
PATHS = tuple(f"tests/ops/test_{n}.py" for n in ("gdn", "kda", "gla", "delta", "simple_gla", "gdn2", "rwkv7", "dplr_delta",
                                                 "delta_product", "lightning_attn", "retention"))
WORDS = ("--noconftest",)
_KERNEL = "a kernel of FLA's own, which needs a GPU"
#: With a GPU none of them differs.
DIFFERENT = {} if DEVICE != "cpu" else {
    r"test_gate\b|test_gate\[|_addcmul|_k_update|gate_output_correction|channel_mixing|test_layer": _KERNEL,
    r"test_prepare_wy_repr_bwd|vllm_decode|multihead_gradients": _KERNEL,
    r"test_parallel": "parallel forms are not served",
    r"test_flash_qla|test_flash_kda|triton_ascend|blackwell_triton_guard": "other backends",
    r"return_intermediate_states|-D320-|-D512-": "left to FLA"}
_available = torch.cuda.is_available


def prepare(root: Path) -> None:
    os.environ["FLA_DISABLE_BACKEND_DISPATCH"] = "1"  # otherwise tests with HV unlike H skip themselves
    if not (root / "fla").is_dir():
        sys.path[:] = [p for p in sys.path if p and Path(p).resolve() != root]
    importlib.import_module("gdn_codegen.integrations.fla")
    torch.cuda.is_available = lambda: True  # where tests ask for a GPU, they mean one for FLA's kernels


def adapt(module: Any) -> None:
    torch.cuda.is_available = _available
    module.device = DEVICE
