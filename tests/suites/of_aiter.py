"""AITER's op_tests/test_gated_delta_rule.py (e4048607a5)."""
from __future__ import annotations

from pathlib import Path
from typing import Any

from suite import DEVICE, absent, chunk, package, recurrent, without_gradients

ENV, PATHS = "SUITE_AITER", ("op_tests/test_gated_delta_rule.py",)
_STEP = "a step of AITER's own chain of kernels"
WORDS = ("--noconftest",)
DIFFERENT = {
    r"gfx12|hip|flydsl": "AITER's kernels for AMD GPUs, or the choice between them",
    r"test_solve_tril|test_chunk_opt_vk_indice|test_chunk_snapshot_dtype|test_chunk_fwd_h": _STEP,
    r"rejects_dense_index_count": "the words of an error of its own"}
#: Which of its kernels serve a call, and what it stores between them: nothing that a result shows.
INTERNAL = ("use_chunk_hip", "use_chunk_flydsl", "use_prepare_flydsl", "use_exp2", "seq_lens_cpu", "prefill_metadata",
            "snapshot_dtype")


def opt_vk(q: Any, k: Any, v: Any, o: Any = None, g: Any = None, beta: Any = None, scale: Any = None, initial_state: Any = None,
           output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False, cu_seqlens: Any = None,
           use_chunk_hip: Any = False, use_chunk_flydsl: Any = False, use_prepare_flydsl: Any = False, state_dtype: Any = None,
           use_exp2: Any = True,
           num_decodes: int = 0, num_decode_tokens: int = 0, **others: Any) -> Any:
    """Its order of arguments; states [V, K]."""
    assert not num_decodes and not num_decode_tokens
    more = {n: x for n, x in others.items() if n not in INTERNAL and x is not None}
    return chunk(q, k, v, g, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens,
                 state_v_first=True, out=o, **({"state_dtype": state_dtype} if state_dtype else {}), **more)


def sigmoid_gating(A_log: Any, a: Any, dt_bias: Any, softplus_beta: float, softplus_threshold: float, q: Any, k: Any, v: Any,
                   b: Any, initial_state_source: Any, initial_state_indices: Any, scale: Any = None,
                   use_qk_l2norm_in_kernel: bool = False, cu_seqlens: Any = None, **others: Any) -> Any:
    assert softplus_beta == 1.0 and softplus_threshold == 20.0 and not others, (softplus_beta, softplus_threshold, others)
    return recurrent(q=q, k=k, v=v, g=a, beta=b, scale=scale, gate="raw", A_log=A_log, dt_bias=dt_bias, beta_form="sigmoid",
                     initial_state=initial_state_source, state_indices=initial_state_indices, cu_seqlens=cu_seqlens,
                     use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, output_final_state=True)[0]


def prepare(root: Path) -> None:
    for name in ("aiter", "aiter.ops", "aiter.ops.triton", "aiter.ops.triton._triton_kernels", "aiter.ops.flydsl"):
        package(name)
    rule = "aiter.ops.triton._triton_kernels.gated_delta_rule"
    package(rule, root / rule.replace(".", "/"))  # the comparison and the device are its own
    package(f"{rule}.decode")
    package(f"{rule}.decode.fused_sigmoid_gating_recurrent", fused_sigmoid_gating_delta_rule_update=sigmoid_gating)
    steps = ("chunk_gated_delta_rule_fwd_h_opt_vk", "chunk_gated_delta_rule_fwd_h", "fused_chunk_local_cumsum_scaled_dot_kkt_fwd",
             "fused_solve_tril_recompute_w_u", "fused_solve_tril_recompute")
    package(f"{rule}.prefill", **{n: absent(n) for n in steps})
    package("aiter.ops.chunk_gated_delta_rule_fwd_h", chunk_gated_delta_rule_fwd_h_hip_fn=absent("hip"))
    package("aiter.ops.flydsl.linear_attention_prefill_kernels", chunk_gated_delta_rule_fwd_h_flydsl_opt=absent("flydsl"))
    package("aiter.ops.triton.gated_delta_net", chunk_gated_delta_rule=chunk, chunk_gated_delta_rule_opt=chunk,
            chunk_gated_delta_rule_opt_vk=opt_vk, fused_recurrent_gated_delta_rule=recurrent)


def adapt(module: Any) -> None:
    module.device = DEVICE
    module.assert_close = without_gradients(module.assert_close)
