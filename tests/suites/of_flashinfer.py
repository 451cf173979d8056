"""FlashInfer's tests/gdn (fb28d7242): prefill, slots of a pool, decoding."""
from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from suite import DEVICE, Torch, chunk, package, recurrent

ENV = "SUITE_FLASHINFER"
PATHS = ("tests/gdn/test_prefill_delta_rule.py", "tests/gdn/test_prefill_state_indices.py", "tests/gdn/test_decode_delta_rule.py")
WORDS = ("--import-mode=importlib", "--confcutdir=tests/gdn")
#: The other files of tests/gdn are about kernels of its own: context parallel parts, `ucache`, the decoding step fused with a
#: convolution, strides of CuTe.
DIFFERENT = {
    r"test_checkpoint_(alignment_error|negative_interval|missing_tensors|spurious_tensors|wrong_dtype|wrong_cu_starts_size)":
        "the words of its errors, of arguments that are not here: checkpoints are asked for by checkpoint_chunks",
    r"requires_output_state_pool": "the words of an error of its own: a pool is written in place, unless said otherwise",
    r"zero_length_sequence_state_untouched": "a sequence without tokens has its initial state for its final one here; there the "
                                             "buffer keeps what it had",
    r"preserves_inner_strides": "slots of a pool may lie apart, each is dense",
    r"test_output_state_indices": "a final state goes back to the slot that it came from; other slots are refused by name",
    r"mtp_fp32_state_pool\[\d+-\d+-True": "a final state goes back to the slot that it came from; others are refused by name",
    r"mtp_fp32_state_pool_non_contiguous": "slots of a pool may lie apart, each is dense",
    r"fla_scatter": "slots for draft tokens, and one more to start from",
    r"mtp_reuses_compile|mtp_packed_qkv|non_bf16_output|fp16_inputs_are_converted":
        "which kernels of its own are compiled, and called for what",
    r"bf16_state|bf16_wy|bf16_padding": "kernels of bfloat16 states by their own names; slot 0 for padding"}
C = 64


def _heads(q: Any, k: Any, v: Any) -> tuple[Any, Any, Any]:
    """Where q has more heads than k and v: those repeated, as our op has as many heads in q as in k."""
    if q.shape[-2] <= k.shape[-2]:
        return q, k, v
    times = q.shape[-2] // k.shape[-2]
    return q, k.repeat_interleave(times, -2), v.repeat_interleave(times, -2)


def prefill(q: Any, k: Any, v: Any, g: Any = None, beta: Any = None, scale: Any = None, initial_state: Any = None,
            output_final_state: bool = False, cu_seqlens: Any = None, use_qk_l2norm_in_kernel: bool = False, output: Any = None,
            output_state: Any = None, state_checkpoints: Any = None, checkpoint_cu_starts: Any = None,
            checkpoint_every_n_tokens: int = 0, use_cp: Any = "auto", state_indices: Any = None,
            _cp_chunk_len: Any = None) -> Any:
    """Packed tensors [T, heads, ...], states [V, K], gates as factors; `use_cp` is the schedule's matter here. There
    use_qk_l2norm_in_kernel does nothing, and the tests count on that, so it is not passed on."""
    q, k, v = _heads(q, k, v)
    rows = v.shape[:2]
    g = torch.ones(rows, dtype=torch.float32, device=q.device) if g is None else g
    beta = torch.ones(rows, dtype=torch.float32, device=q.device) if beta is None else beta
    said: dict[str, Any] = {"out": None if output is None else output[None]}
    if state_indices is not None:
        said["state_indices"] = state_indices
        said.update({} if output_state is initial_state else {"inplace_final_state": False} if output_state is None else
                    {"final_state": output_state})
    elif output_final_state and output_state is not None:
        said["final_state"] = output_state
    if checkpoint_every_n_tokens:
        said["checkpoint_chunks"] = checkpoint_every_n_tokens // C
    o, final, *more = chunk(q[None], k[None], v[None], g[None], beta[None], scale, initial_state=initial_state,
                            output_final_state=output_final_state, cu_seqlens=cu_seqlens, gate="linear", state_v_first=True,
                            chunk_size=C, **said)
    if more:
        starts = checkpoint_cu_starts.tolist()
        for n, (at, _) in enumerate(pairwise(cu_seqlens.tolist())):
            row = at // checkpoint_every_n_tokens
            state_checkpoints[starts[n]:starts[n + 1]] = more[0][row:row + starts[n + 1] - starts[n]]
    return (o[0], final) if output_final_state else o[0]


def _step(v_first: bool) -> Any:
    def step(q: Any, k: Any, v: Any, state: Any, A_log: Any, a: Any, dt_bias: Any, b: Any, scale: Any = None, output: Any = None,
             use_qk_l2norm: bool = True, initial_state: Any = None, initial_state_indices: Any = None,
             output_state_indices: Any = None) -> Any:
        q, k, v = _heads(q, k, v)
        pool = {"initial_state": state, "inplace_final_state": True} if state is not None else \
            {"initial_state": initial_state, "state_indices": initial_state_indices}
        more = {"output_state_indices": output_state_indices} if output_state_indices is not None else {}
        return recurrent(q=q, k=k, v=v, g=a, beta=b, scale=scale, gate="raw", A_log=A_log, dt_bias=dt_bias, beta_form="sigmoid",
                         use_qk_l2norm_in_kernel=use_qk_l2norm, state_v_first=v_first, output_final_state=True,
                         **({"out": output} if output is not None else {}), **pool, **more)
    return step


def mtp(q: Any, k: Any, v: Any, initial_state: Any, initial_state_indices: Any, A_log: Any, a: Any, dt_bias: Any, b: Any,
        scale: Any = None, output: Any = None, intermediate_states_buffer: Any = None, disable_state_update: Any = None,
        use_qk_l2norm: bool = True, output_state_indices: Any = None) -> Any:
    """Draft tokens: a state for each, in a buffer with a row for each sequence. The pool is left alone unless said otherwise."""
    q, k, v = _heads(q, k, v)
    o, _ = recurrent(q=q, k=k, v=v, g=a, beta=b, scale=scale, gate="raw", A_log=A_log, dt_bias=dt_bias, beta_form="sigmoid",
                     use_qk_l2norm_in_kernel=use_qk_l2norm, state_v_first=True, initial_state=initial_state,
                     state_indices=initial_state_indices, intermediate_states_buffer=intermediate_states_buffer,
                     disable_state_update=disable_state_update is None or bool(disable_state_update),
                     output_state_indices=output_state_indices,
                     **({"out": output} if output is not None else {}))
    return o, initial_state


def prepare(root: Path) -> None:
    yes, no = (lambda *a: True), (lambda *a: False)
    package("flashinfer")
    package("flashinfer.utils", is_sm90a_supported=yes, is_sm100a_supported=no, is_sm12x_supported=no, is_sm120a_supported=no,
            get_compute_capability=lambda *a: (9, 0))
    package("flashinfer.gdn_prefill", chunk_gated_delta_rule=prefill)
    package("flashinfer.gdn_decode", gated_delta_rule_decode_pretranspose=_step(True), gated_delta_rule_decode=_step(False),
            gated_delta_rule_mtp=mtp)


def adapt(module: Any) -> None:
    if DEVICE == "cpu":
        module.torch = Torch()
