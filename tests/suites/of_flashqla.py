"""FlashQLA's tests/test_gdr_unit.py (c18a486)."""
from __future__ import annotations

import sys
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from suite import DEVICE, absent, chunk, package

ENV, PATHS = "SUITE_FLASHQLA", ("tests/test_gdr_unit.py",)
WORDS = ("--noconftest",)  # it skips all without a GPU
DIFFERENT = {
    r"test_bwd": "its backward pass is called with values that its forward pass keeps",
    r"test_mixed_cp_control": "its backward pass is called with values that its forward pass keeps",
    r"test_fwd_cp_cache": "a cache of its context parallel parts, which here belong to the schedule"}
C = 64


def forward(q: Any, k: Any, v: Any, g: Any, beta: Any, scale: Any = None, initial_state: Any = None, cu_seqlens: Any = None,
            output_final_state: bool = True, output_h: bool = False, auto_cp: bool = True, state_v_first: bool = False,
            **others: Any) -> tuple[Any, ...]:
    """FlashQLA's order: sums of g and inverses (of which its own backward pass is fed; none here), o, states before each chunk,
    final states."""
    if others.pop("enable_fwd_cp_cache", False) or others:
        raise NotImplementedError(str(others))
    o, final, *more = chunk(q, k, v, g, beta, scale, initial_state=initial_state, output_final_state=output_final_state,
                            cu_seqlens=cu_seqlens, state_v_first=state_v_first, chunk_size=C, checkpoint_chunks=int(output_h))
    return None, None, o, _before(more[0], v, initial_state, cu_seqlens) if output_h else None, final, None


def _before(after: Any, v: Any, initial: Any, ends: Any) -> Any:
    """The states before each chunk, of those after: FlashQLA has a row for each chunk begun, we one for each that is full."""
    B, T = v.shape[:2]
    at = ends.tolist() if ends is not None else [b * T for b in range(B + 1)]
    rows = []
    for n, (first, end) in enumerate(pairwise(at)):
        start = initial[n] if initial is not None else torch.zeros_like(after[0]) if len(after) else after.new_zeros(
            v.shape[2], 128, 128)
        full = max(0, -(-(end - first) // C) - 1)
        rows += [start[None].to(after.dtype), after[first // C:first // C + full]] if end > first else []
    return torch.cat(rows).unflatten(0, (B if ends is None else 1, -1))


def prepare(root: Path) -> None:
    package("flash_qla", root / "flash_qla", chunk_gated_delta_rule_fwd=forward, chunk_gated_delta_rule_bwd=absent("backward"))
    if DEVICE == "cpu":
        import tilelang
        torch.cuda.device = lambda *a: nullcontext()  # type: ignore[assignment,misc]
        tilelang.contrib.nvcc.get_target_compute_version = lambda *a: "9.0"


def adapt(module: Any) -> None:
    module.DEVICE, module.DETERMINISM_ITERS = DEVICE, 20
    if DEVICE == "cpu":  # its cache of tables asks for a GPU
        plain = sys.modules["ref_gdr"].prepare_chunk_offsets
        sys.modules["ref_gdr"].prepare_chunk_offsets = getattr(plain, "__wrapped__", plain)  # type: ignore[attr-defined]
