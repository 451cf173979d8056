"""Ops for callers of the package: built on first use, then called like any function. Signatures only; see runtime/."""
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .host.arguments import _check_number
from .host.tensors import _fail
from .runtime.call import launch
from .runtime.call.arguments import POSITIONS, RAW_INPUTS, Options, Tensors
from .runtime.call.differentiable import asked_of, differentiates
from .runtime.call.dtypes import adapted, adapts
from .runtime.call.gradient import check_built
from .runtime.call.known_keywords import spelled
from .runtime.call.launch import check_values, eager
from .runtime.call.normalise import is_step, shape_of
from .runtime.call.request import DECODE_CHUNK
from .runtime.call.run import run_checked
from .runtime.gradient_library import differentiated
from .runtime.torch_library import compiled, inputs_by_name
from .schedule import Schedule

State = Tensor | None


def _call(t: tuple[Any, ...], x: tuple[Any, ...], scale: float | None, others: dict[str, Any], decode: bool = False,
          few: bool = False, ours: bool = False) -> tuple[Any, ...]:
    """o, the final state, and the checkpoints if the call has some.

    t, x: Tensors and Options, as plain tuples, which take a tenth of the time to make. others: keywords of other libraries; ours:
    also of this one. decode: take the kernel for decoding steps. few: refuse more tokens than such a step has.
    """
    if others:
        t, x = spelled(t, x, others, -1 if few else DECODE_CHUNK if decode else 0, ours)
    at = t[POSITIONS] is not None or t[POSITIONS + 1] is not None
    if not at and not torch.compiler.is_dynamo_compiling():
        for again in launch.recent:
            results: tuple[Any, ...] | None = again(t, x, scale, decode)
            if results is not None:
                if again is not launch.recent[0]:
                    launch.ask_first(again)
                return results
    return _looked_up(t, x, scale, decode, few, at)


def _looked_up(t: tuple[Any, ...], x: tuple[Any, ...], scale: float | None, decode: bool, few: bool, at: bool) -> tuple[Any, ...]:
    """`_call` where no launcher of recent calls took it. at: whether the call names positions of states.

    A function of its own: Python makes the cells of the closure `call` at each call of the function around it.
    """
    scale = None if scale is None else _check_number("scale", scale)
    # tensors of classes that dispatch ops themselves, as fake ones, and tracers get a torch op
    plain = not torch.compiler.is_compiling() and not torch._C._len_torch_dispatch_stack()
    if plain and not at:
        results: tuple[Any, ...] | None = eager(t, x, scale, decode, few)
        if results is not None:
            return results
    tensors, options = Tensors(*t), Options(*x)
    asked = asked_of(tensors, options, decode)
    check_values(tensors, asked, few)
    if plain and launch.are_plain(t) and differentiates(t[:RAW_INPUTS + 1]):
        inputs = inputs_by_name(tensors, asked)
        check_built(inputs, tensors, asked)
        if not asked.saves:
            return differentiated(lambda: _call(t, x, scale, {}, decode, few), inputs, tensors, asked, scale)

    def call(t: Tensors, x: Options) -> tuple[Any, ...]:
        here = asked if t is tensors else asked_of(t, x, decode)  # dtypes differ
        results = run_checked(t, here, scale) if plain and at and launch.are_plain(t) else compiled(t, here, scale)
        return results if here.checkpoint_chunks else results[:2]

    return adapted(tensors, options, call) if adapts(tensors, options) else call(tensors, options)


def chunk_gated_delta_rule(
        q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float | None = None, initial_state: State = None,
        output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False, cu_seqlens: Tensor | None = None,
        head_first: bool = False, *, layout: str | None = None, out: Tensor | None = None,
        gate: str = "log", A_log: Tensor | None = None, dt_bias: Tensor | None = None,
        beta_form: str = "given", allow_neg_eigval: bool = False,
        state_v_first: bool = False, state_dtype: torch.dtype | None = None, final_state: State = None,
        state_indices: Tensor | None = None, inplace_final_state: bool | None = None, checkpoint_chunks: int = 0,
        checkpoint_positions: Tensor | None = None, checkpoint_slots: Tensor | None = None, aligned_positions: bool = False,
        chunk_indices: Tensor | None = None, chunk_offsets: Tensor | None = None, unit_keys: bool = False,
        target: str = "auto", chunk_size: int | None = None, schedule: str | Schedule | None = None,
        batch_invariant: bool | None = None, save: str = "nothing", **kwargs: Any) -> tuple[Any, ...]:
    """Gated DeltaNet prefill (arXiv:2412.06464). Returns (o, final state or None). Differentiable (docs/training.md).

    Inputs.
      q, k: [B, T, H, K]; v: [B, T, HV, V], where HV is a multiple of H; g, beta: [B, T, HV].
      q, k and v have one dtype: float16, bfloat16 or float32. g and beta have any of the three. If v has 16 bits, q and k may be
      float32; they are rounded to v's dtype.
      layout: "bthd" (the default) or "bhtd", which swaps T and heads; head_first=True means "bhtd". "bsnd" and "bnsd" are
      synonyms.
      cu_seqlens: int32 or int64 [N + 1]. Packs N sequences into B = 1. The keyword max_seqlen: tokens of the longest sequence.
      scale: a number; None means K ** -0.5.
      use_qk_l2norm_in_kernel: divide rows of q and k by their L2 norms first.
      unit_keys: a promise that rows of k have norm 1, up to rounding. Where a long sequence is split into parts, the kernels then
      compute warm-up lengths from g and beta alone, and read k once less.
    Gates.
      gate: "log" (g is the log of the decay), "linear" (g is the decay), or "raw": the log decay is
      -exp(A_log) softplus(g + dt_bias), with A_log and dt_bias [HV] (FLA: use_gate_in_kernel=True).
      beta_form: "given", "sigmoid" (FLA: use_beta_sigmoid_in_kernel=True) or "twice_sigmoid" (with allow_neg_eigval=True).
    States.
      initial_state: [N, HV, K, V], or [N, HV, V, K] with state_v_first=True.
      output_final_state: return the final state, in state_dtype (None means float32).
      final_state: a buffer for it. inplace_final_state: write it over initial_state; so does final_state=initial_state.
      state_indices: int32 or int64 [N]. initial_state is then a pool [slots, HV, K, V], and these are the slots of the
      sequences; -1 skips a sequence. The pool is written in place unless inplace_final_state=False or final_state is another
      tensor.
      checkpoint_chunks: n > 0 adds a third result, the states every n chunks.
      checkpoint_positions, checkpoint_slots: int32 or int64 [N, P]. The state of sequence n after the first
      checkpoint_positions[n, i] tokens of this call is also written to slot checkpoint_slots[n, i] of the pool of final states,
      or of the keyword checkpoint_states. Slot -1 writes nothing. No slot occurs twice, and none is among state_indices.
      aligned_positions: a promise that these are multiples of the chunk (64, or chunk_size), each once. That takes less time.
    Output and choice of the kernel.
      out: a buffer for o, with v's shape and dtype.
      target: "auto" takes one that runs on q's device. chunk_size (1, 16, 32, 64, 128) and schedule: None lets the package
        choose.
      batch_invariant: the bits of a sequence's result do not depend on the rest of the batch, nor on where a prompt is cut, if
        it is cut at multiples of the chunk (64 tokens, or chunk_size). States are float32. None asks
        GDN_CODEGEN_BATCH_INVARIANT=1. docs/contract.md says what it costs.
      save: what a call keeps for its gradient: "nothing", "states" or "rounded_states", those before chunks (docs/training.md).
      chunk_indices, chunk_offsets: FLA's tables of chunks. Kernels do not use them; values are checked for CPU tensors, and with
        GDN_CODEGEN_CHECK=1. Other keywords are those of other libraries (docs/contract.md).

    Raises ValueError that names the bad argument (docs/errors.md).
    """
    t = (q, k, v, g, beta, A_log, dt_bias, initial_state, state_indices, None, None, None, cu_seqlens, final_state, out, None,
         chunk_indices, chunk_offsets, checkpoint_positions, checkpoint_slots)
    x = (output_final_state, use_qk_l2norm_in_kernel, head_first, layout, gate, beta_form, allow_neg_eigval, state_v_first,
         state_dtype, inplace_final_state, target, schedule, chunk_size, checkpoint_chunks, unit_keys, batch_invariant,
         aligned_positions, 0, save)
    return _call(t, x, scale, kwargs)


def recurrent_gated_delta_rule(
        q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float | None = None, initial_state: State = None,
        output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False, cu_seqlens: Tensor | None = None,
        head_first: bool = False, *, layout: str | None = None, out: Tensor | None = None,
        gate: str = "log", A_log: Tensor | None = None, dt_bias: Tensor | None = None,
        beta_form: str = "given", allow_neg_eigval: bool = False,
        state_v_first: bool = False, state_dtype: torch.dtype | None = None, final_state: State = None,
        state_indices: Tensor | None = None, inplace_final_state: bool | None = None,
        num_accepted_tokens: Tensor | None = None, retrieve_parent_token: Tensor | None = None,
        intermediate_states_buffer: Tensor | None = None, intermediate_state_indices: Tensor | None = None,
        target: str = "auto", schedule: str | Schedule | None = None, batch_invariant: bool | None = None,
        **kwargs: Any) -> tuple[Any, ...]:
    """Gated DeltaNet decoding: 1 to 16 new tokens per sequence. Returns (o, final state or None).

    The arguments are those of `chunk_gated_delta_rule`, without unit_keys, checkpoint_chunks, checkpoint_positions,
    checkpoint_slots, aligned_positions, chunk_size and FLA's tables of chunks. One kernel computes all tokens, as one chunk of 16
    or as chunks of one token. With batch_invariant=True chunks have one token (on PTO 16), so that any cut leaves the bits as
    they are.

    Verification of draft tokens keeps a state for each token (W is at least the most tokens of a sequence):
      state_indices: [N, W], slots of the pool. The state after token t of sequence n is written to slot [n, t]; -1 stores none.
      num_accepted_tokens: [N]. Sequence n starts from slot [n, num_accepted_tokens[n] - 1], not from slot [n, 0].
      intermediate_states_buffer: [rows, W, HV, K, V], or [rows, W, HV, V, K] with state_v_first=True, in the dtype of the other
      states. Instead of slots: the state after token t is written to [row, t]. intermediate_state_indices: [N], the row of each
      sequence; -1 stores nothing. None means rows in order.
      retrieve_parent_token: [N, W]. Tokens form a tree. A token starts from the state after its parent, an earlier token of the
      sequence; -1 is the initial state, from which first tokens start in any case.
      disable_state_update=True (or inplace_final_state=False): nothing is written to the pool.

    Raises ValueError where T is above 16, or where values of cu_seqlens are read and a sequence has more than 16 tokens.
    """
    t = (q, k, v, g, beta, A_log, dt_bias, initial_state, state_indices, num_accepted_tokens, retrieve_parent_token,
         intermediate_state_indices, cu_seqlens, final_state, out, intermediate_states_buffer, None, None, None, None)
    x = (output_final_state, use_qk_l2norm_in_kernel, head_first, layout, gate, beta_form, allow_neg_eigval, state_v_first,
         state_dtype, inplace_final_state, target, schedule, None, 0, False, batch_invariant, False, 0, "nothing")
    return _call(t, x, scale, kwargs, decode=True, few=True)


def fused_recurrent_gated_delta_rule(
        q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None, gk: Tensor | None = None, gv: Tensor | None = None,
        beta: Tensor | None = None, scale: float | None = None, initial_state: State = None, output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False, use_gate_in_kernel: bool = False, A_log: Tensor | None = None,
        dt_bias: Tensor | None = None, use_beta_sigmoid_in_kernel: bool = False, allow_neg_eigval: bool = False,
        state_v_first: bool = False, cu_seqlens: Tensor | None = None, **kwargs: Any) -> tuple[Any, ...]:
    """Gated DeltaNet with the argument order of FLA 0.5.1's function of this name. Returns (o, final state or None).

    Takes any number of tokens: up to 16 per sequence it is `recurrent_gated_delta_rule`, above that `chunk_gated_delta_rule`,
    whose other keywords it takes, too. With batch_invariant=True it walks over single tokens, however many there are. g=None
    means no decay, beta=None means 1. A_log and dt_bias are ignored unless use_gate_in_kernel=True, as in FLA.

    Raises ValueError that names the bad argument; gk and gv (gates per key or value channel) must be None.
    """
    if g is None and (use_gate_in_kernel or kwargs.get("gate", "log") != "log"):
        _fail("g", None, "a tensor, from which this form computes the gate")
    if beta is None and (use_beta_sigmoid_in_kernel or kwargs.get("beta_form", "given") != "given"):
        _fail("beta", None, "a tensor, from which this form computes beta")
    shape = shape_of("v", v)
    if g is None or beta is None:
        g = v.new_zeros(shape[:3], dtype=torch.float32) if g is None else g
        beta = v.new_ones(shape[:3], dtype=torch.float32) if beta is None else beta
    t = (q, k, v, g, beta, A_log, dt_bias, initial_state, None, None, None, None, cu_seqlens, None, None, None, None, None, None,
         None)
    x = (output_final_state, use_qk_l2norm_in_kernel, False, None, "log", "given", allow_neg_eigval, state_v_first, None, None,
         "auto", None, None, 0, False, None, False, 0, "nothing")
    if gk is not None or gv is not None:
        kwargs.update(gk=gk, gv=gv)
    if use_gate_in_kernel is not False or "gate" not in kwargs:  # our own keyword wins over a flag that was not set
        kwargs["use_gate_in_kernel"] = use_gate_in_kernel
    if use_beta_sigmoid_in_kernel is not False or "beta_form" not in kwargs:
        kwargs["use_beta_sigmoid_in_kernel"] = use_beta_sigmoid_in_kernel
    return _call(t, x, scale, kwargs, decode=is_step(shape, cu_seqlens, kwargs), ours=True)


def chunk_gated_delta_rule_npu(
        q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float | None = None, initial_state: State = None,
        output_final_state: bool = True, cu_seqlens: Tensor | None = None, head_first: bool = False,
        use_qk_l2norm_in_kernel: bool = False, **kwargs: Any) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """`chunk_gated_delta_rule` with sgl-kernel-npu's signature. Returns (o, final state or None, checkpoints or None).

    The third result is None unless checkpoint_chunks is given. In sgl-kernel-npu it holds the states of all chunks.
    """
    o, final, *rest = chunk_gated_delta_rule(q, k, v, g, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel,
                                             cu_seqlens, head_first, **kwargs)
    return o, final, rest[0] if rest else None
