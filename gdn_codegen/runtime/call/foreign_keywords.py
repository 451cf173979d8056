"""Translates keywords of other libraries, or refuses them with a reason. docs/contract.md lists them by library."""
from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ...host.arguments import _check_flag
from ...host.tensors import _fail, _integer
from .arguments import DERIVED
from .by_token import ARGUMENTS, absent
from .normalise import check_cpu_ends, check_plain, reads
from .request import DEFAULT_CHUNK

#: Another library's keyword -> ours.
ALIASES = {
    "transpose_state_layout": "state_v_first", "use_qk_l2norm": "use_qk_l2norm_in_kernel", "cu_seq_lens_q": "cu_seqlens",
    "ssm_state_indices": "state_indices", "initial_state_indices": "state_indices", "initial_state_source": "initial_state",
    "inplace_update": "inplace_final_state", "inplace_indexed_state_update": "inplace_final_state",
    "output": "out", "o": "out", "output_state": "final_state"}
_DRAFT = "the op keeps states of draft tokens, not the tokens to compute them again"
_RING = "the op stores states, not tokens from which to compute them again"
_NOT_HERE = "no value, because only chunk_gated_delta_rule has this argument"
_PACKED = "cu_seqlens describes all tokens of q"
_TREE = "pass the tree as retrieve_parent_token"
_GATE = "the op has one gate for each token and head, which is g"
_KEPT = "checkpoint_chunks=n returns the state every n chunks"
#: Keywords for features that this op does not have -> the values that do not ask for the feature, and why others are refused.
ONLY: dict[str, tuple[tuple[Any, ...], str]] = {
    "gk": ((None,), _GATE), "gv": ((None,), _GATE), "g_gamma": ((None,), _GATE), "is_kda": ((False,), _GATE),
    "lower_bound": ((None,), "the gate is -exp(A_log) softplus(g + dt_bias), without a bound"),
    "softplus_beta": ((1,), "the gate is -exp(A_log) softplus(g + dt_bias)"),
    "softplus_threshold": ((20,), "no other threshold is possible"), "threshold": ((20,), "no other threshold is possible"),
    "a": ((None,), "pass it as g, with gate='raw'"), "b": ((None,), "pass it as beta, with beta_form='sigmoid'"),
    "cp_context": ((None,), "a whole sequence is on one device"),
    "ddtree_parent_ids": ((None,), _TREE), "accepted_steps": ((None,), _DRAFT), "recovery_steps": ((None,), _DRAFT),
    "disable_output_calculation": ((False,), "o is always computed"),
    "disable_output": ((False,), "o is always computed"),
    "has_initial_state": ((None,), "every slot of state_indices is read: zero those of new sequences"),
    "return_intermediate_states": ((None, False), _KEPT), "output_h": ((None, False), _KEPT),
    "state_checkpoints": ((None,), _KEPT + ", in rows of another order"),
    "checkpoint_cu_starts": ((None,), _KEPT + ", in rows of another order"),
    "num_decodes": ((0,), _PACKED), "num_decode_tokens": ((0,), _PACKED),
    "snapshot_dtype": ((None,), "kernels keep the state in float32"),
    "use_rs_rounding": ((None, False), "states are rounded to nearest, not at random"),
    "rand_seed": ((None,), "states are rounded to nearest, not at random"),
    "cache_ring": ((False,), _RING), **dict.fromkeys(("replayssm_rawv", "replayssm_rawk", "replayssm_g", "replayssm_beta"),
                                                     ((None,), _RING))}
#: Keywords that change no result: how another library runs, tables for its kernels, what a model passes to all its layers.
IGNORED = frozenset({
    "num_warps", "num_stages", "tile_v", "use_cp", "_cp_chunk_len", "auto_cp", "enable_fwd_cp_cache", "use_chunk_hip",
    "use_chunk_flydsl", "use_prepare_flydsl", "use_exp2", "seq_lens_cpu", "prefill_metadata", "prebuilt_meta",
    "philox_rounds", "use_cache", "position_ids", "num_items_in_batch", "output_hidden_states", "output_attentions",
    "output_router_logits", "cu_seq_lens_k", "max_length_k"})
_UNSET = {"state_v_first": False, "use_qk_l2norm_in_kernel": False}


def _said(x: Any) -> str:
    return type(x).__name__ if isinstance(x, Tensor) else repr(x)


def _alias(own: dict[str, Any], name: str, x: Any) -> None:
    ours = ALIASES[name]
    if x is None and ours not in _UNSET:
        return
    if own[ours] is not _UNSET.get(ours):
        _fail(name, f"both {name} and {ours}", f"one of them: {ours}")
    own[ours] = x


def by_our_names(said: dict[str, Any]) -> dict[str, Any]:
    """Arguments by name, with synonyms under our names. ValueError where both are given."""
    own = {n: x for n, x in said.items() if n not in ALIASES}
    for name in [n for n in said if n in ALIASES]:
        own.setdefault(ALIASES[name], _UNSET.get(ALIASES[name]))
        _alias(own, name, said[name])
    return own


def ends_of(cu_seqlens: Any, others: dict[str, Any]) -> Any:
    """cu_seqlens, by whichever of its names it is given. others: keywords of the call."""
    names = [n for n, ours in ALIASES.items() if ours == "cu_seqlens" and others.get(n) is not None]
    return others[names[0]] if cu_seqlens is None and names else cu_seqlens


def _gate(own: dict[str, Any], x: Any, _: int) -> None:
    if _check_flag("use_gate_in_kernel", x):
        if own["gate"] == "linear":
            _fail("use_gate_in_kernel", "True with gate='linear'", "gate='raw', or use_gate_in_kernel=False")
        own["gate"] = "raw"
    elif own["gate"] == "raw":
        _fail("use_gate_in_kernel", "False with gate='raw'", "use_gate_in_kernel=True, or another gate")
    else:  # as FLA has it: what the kernel would need is not for this call
        own["A_log"] = own["dt_bias"] = None


def _beta(own: dict[str, Any], x: Any, _: int) -> None:
    given = own["beta_form"] == "given"
    if _check_flag("use_beta_sigmoid_in_kernel", x):
        own["beta_form"] = "sigmoid" if given else own["beta_form"]
    elif not given:
        _fail("use_beta_sigmoid_in_kernel", f"False with beta_form={own['beta_form']!r}", "True, or beta_form='given'")


def _state(own: dict[str, Any], x: Any, _: int) -> None:
    """FlashInfer's keyword: one state for each sequence, read and then written."""
    if x is not None:
        for ours in ("initial_state", "inplace_final_state"):
            if own[ours] is not None:
                _fail("state", f"both state and {ours}", "one of them: state is initial_state with inplace_final_state=True")
        own.update(initial_state=x, inplace_final_state=True)


def _no_update(own: dict[str, Any], x: Any, _: int) -> None:
    if _check_flag("disable_state_update", x):
        if own["inplace_final_state"] is True:
            _fail("disable_state_update", "True with inplace_final_state=True", "one of them, because they contradict each other")
        own["inplace_final_state"] = False


def _first_rows(own: dict[str, Any], x: Any, _: int) -> None:
    """vLLM's buffer for o: it has any shape, and o takes its first elements."""
    if x is None:
        return
    if own["out"] is not None:
        _fail("core_attn_out", "both core_attn_out and out", "one of them: out")
    v = own["v"]
    if isinstance(x, Tensor) and isinstance(v, Tensor) and x.shape != v.shape and x.is_contiguous() and x.numel() >= v.numel():
        x = x.view(-1)[:v.numel()].view(v.shape)
    own["out"] = x


def _same_slots(own: dict[str, Any], x: Any, _: int) -> None:
    if x is not None and x is not own["state_indices"]:
        _fail("output_state_indices", "other indices than state_indices",
             "the same tensor, or None: a state goes back to its slot")


def _every(own: dict[str, Any], x: Any, chunk: int) -> None:
    """FlashInfer's distance between checkpoints, in tokens.

    chunk: tokens of a chunk where the op fixes it, 0 where it does not, -1 in a decoding step, which has no checkpoints.
    """
    if x is None or (type(x) is int and x == 0):
        return
    if chunk < 0:
        _fail("checkpoint_every_n_tokens", _said(x), _NOT_HERE)
    size = chunk or own["chunk_size"] or DEFAULT_CHUNK
    if own["checkpoint_chunks"] != 0:
        _fail("checkpoint_every_n_tokens", "both checkpoint_every_n_tokens and checkpoint_chunks",
             "one of them: checkpoint_chunks")
    if type(x) is not int or type(size) is not int or x < 0 or x % size:
        _fail("checkpoint_every_n_tokens", _said(x), f"a multiple of the chunk, {size} tokens")
    own["checkpoint_chunks"] = x // size


def _steps(own: dict[str, Any], x: Any, _: int) -> None:
    """SGLang's number of states in a row of its buffer, which repeats the buffer's shape."""
    rows = own["intermediate_states_buffer"]
    steps = rows.shape[1] if isinstance(rows, Tensor) and rows.ndim > 1 else 0
    if x is not None and (type(x) is not int or x not in (0, steps)):
        _fail("cache_steps", _said(x), f"{steps}, as intermediate_states_buffer has, or None")


def _packed(own: dict[str, Any], x: Any, _: int) -> None:
    """transformers' keyword. It repeats what cu_seqlens says, so it is ignored beside cu_seqlens."""
    if x is not None and own["cu_seqlens"] is None:
        _fail("seq_idx", _said(x), "cu_seqlens as well, which says where sequences end, or None")


def _rounded(longest: int) -> int:
    """Rounded up to four binary digits, so that calls of a few lengths share a plan."""
    low = max(longest.bit_length() - 4, 0)
    return -(-longest >> low) << low if longest > 0 else 0


def _lengths(ends: Tensor) -> list[int]:
    return [b - a for a, b in pairwise(ends.tolist())] if ends.ndim == 1 else []


def _of_copy(name: str, x: Any, cu_seqlens: Any) -> int:
    """FLA's copy of cu_seqlens. Fake tensors have no values."""
    check_cpu_ends(x, cu_seqlens)
    return max(_lengths(x), default=0) if type(x) is Tensor and not torch.compiler.is_compiling() else 0


def _of_bound(name: str, x: Any, cu_seqlens: Any) -> int:
    """As many tokens as a sequence has at most."""
    x = _integer(x)
    if not isinstance(x, (int, torch.SymInt)) or isinstance(x, bool):
        _fail(name, _said(x), "an int of 0 or more, or None")
    if cu_seqlens is None:
        _fail(name, x, "cu_seqlens as well, or None")
    if torch.compiler.is_compiling() or type(x) is not int:  # symbols are not compared
        return 0
    if x < 0:
        _fail(name, x, "an int of 0 or more, or None")
    check_plain("cu_seqlens", cu_seqlens)
    if reads(cu_seqlens) and (most := max(_lengths(cu_seqlens), default=0)) > x:
        _fail(name, x, f"at least {most}, the tokens of the longest sequence")
    return x


def _of_host(name: str, x: Any, cu_seqlens: Any) -> int:
    """transformers' keyword. It is ignored without cu_seqlens, and as a tensor, which may be on a device."""
    return 0 if isinstance(x, Tensor) or cu_seqlens is None else _of_bound(name, x, cu_seqlens)


#: Keywords that say how long the longest sequence is -> its tokens, or more; 0 where they do not say, as under torch.compile.
#: Our own one is named as in flash-attn.
LENGTHS: dict[str, Callable[[str, Any, Any], int]] = {
    "cu_seqlens_cpu": _of_copy, "max_seqlen": _of_bound, "max_length_q": _of_host}


def longest(name: str, x: Any, cu_seqlens: Any) -> int:
    """What a keyword of LENGTHS says, rounded up."""
    return _rounded(LENGTHS[name](name, x, cu_seqlens))


def least(before: int, name: str, x: Any, cu_seqlens: Any) -> int:
    """The least that keywords of LENGTHS say. before: what others say, 0 for nothing."""
    found = 0 if x is None else longest(name, x, cu_seqlens)
    return min(found, before or found) if found else before


def _longest(name: str) -> Callable[[dict[str, Any], Any, int], None]:
    def meant(own: dict[str, Any], x: Any, _: int) -> None:
        own["longest"] = least(own["longest"], name, x, own["cu_seqlens"])
    return meant


def _pool_of_checkpoints(own: dict[str, Any], x: Any, _: int) -> None:
    """Our own keyword: memory for states at positions. Within a call it has the place of the buffer for states by token."""
    if x is None:
        return
    if own["checkpoint_positions"] is None:
        _fail("checkpoint_states", _said(x), "None without checkpoint_positions and checkpoint_slots")
    if own["intermediate_states_buffer"] is not None:
        _fail("checkpoint_states", "both checkpoint_states and intermediate_states_buffer", "one of them")
    own["intermediate_states_buffer"] = x


#: Keywords whose translation needs a function: it changes the op's own arguments.
MEANT: dict[str, Callable[[dict[str, Any], Any, int], None]] = {
    "use_gate_in_kernel": _gate, "use_beta_sigmoid_in_kernel": _beta, "state": _state, "disable_state_update": _no_update,
    "cache_steps": _steps, "core_attn_out": _first_rows, "output_state_indices": _same_slots,
    "checkpoint_every_n_tokens": _every, "seq_idx": _packed, **{name: _longest(name) for name in LENGTHS},
    "checkpoint_states": _pool_of_checkpoints}


def _unknown(name: str, own: dict[str, Any]) -> None:
    near = "".join(f"; did you mean {n}?" for n in get_close_matches(name, [*own, "scale", *ALIASES, *MEANT], n=1))
    _fail(name, "a keyword that this op does not know", f"those of docs/contract.md{near}")


def renamed(own: dict[str, Any], others: dict[str, Any], chunk: int = 0) -> dict[str, Any]:
    """`own`, our arguments by name, with what keywords of other libraries say of them; synonyms of our names come first.

    chunk: tokens of a chunk where the op fixes it, 0 where it does not, -1 where it keeps no checkpoints. ValueError for a
    keyword that asks for what this op does not do, and for one that no library has.
    """
    for name in sorted(others, key=lambda name: name not in ALIASES):
        x = others[name]
        if name in ALIASES:
            _alias(own, name, x)
        elif name in MEANT:
            MEANT[name](own, x, chunk)
        elif name in ONLY:
            accepted, why = ONLY[name]
            if not any(x is y or (type(x) in (int, float) and type(y) is int and x == y) for y in accepted):
                _fail(name, _said(x), f"{' or '.join(map(str, accepted))}: {why}")
        elif name in ARGUMENTS:
            absent(name, x)
        elif name in own and name not in DERIVED:
            _fail(name, _said(x), _NOT_HERE)
        elif name not in IGNORED:
            _unknown(name, own)
    return own
