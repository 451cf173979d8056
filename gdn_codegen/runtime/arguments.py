"""What callers pass, in one spelling: aliases of other libraries, defaults, contradictions. Modules check the tensors."""
from __future__ import annotations

import os
import warnings
from itertools import pairwise
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from ..schedule import Schedule
from .build import CHUNKS

#: Another library's keyword -> ours: FLA, vLLM, SGLang, AITER.
ALIASES = {"transpose_state_layout": "state_v_first", "ssm_state_indices": "state_indices",
           "initial_state_indices": "state_indices", "inplace_update": "inplace_final_state",
           "inplace_indexed_state_update": "inplace_final_state"}
#: Keywords that ask for what this op does not do. None or False asks for nothing.
REFUSED = {"gk": "None: a gate a token and head, as g", "gv": "None: a gate a token and head, as g",
           "cp_context": "None: one device holds a sequence",
           "num_accepted_tokens": "None: a state a sequence, not one a draft token",
           "retrieve_parent_token": "None: tokens in a row, not a tree",
           "return_intermediate_states": "False: checkpoint_chunks=n returns the state every n chunks"}
#: How g and beta come -> the contract's word.
GATES = {"log": "", "linear": "linear", "raw": "raw"}
BETAS = {"given": "", "sigmoid": "sigmoid", "twice_sigmoid": "twice_sigmoid"}
LAYOUTS = {"bthd": "bthd", "bsnd": "bthd", "bhtd": "bhtd", "bnsd": "bhtd"}
DTYPES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}
_INTEGERS = (torch.int32, torch.int64)
_unknown: set[str] = set()


class Given(NamedTuple):
    """A call: the arguments of the functional op, in its order, then what a call writes to of its caller's."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    A_log: Tensor | None
    dt_bias: Tensor | None
    initial_state: Tensor | None
    state_indices: Tensor | None
    cu_seqlens: Tensor | None
    scale: float | None
    output_final_state: bool
    gate: str
    beta_form: str
    l2norm: bool
    state_v_first: bool
    state_dtype: str
    checkpoint_chunks: int
    target: str
    chunk_size: int | None
    layout: str
    schedule: Any
    decode: bool
    final_state: Tensor | None
    out: Tensor | None
    in_place: bool


def fail(argument: str, got: Any, accepted: Any) -> NoReturn:
    raise ValueError(f"{argument}: got {got}; accepted: {accepted}")


def _flag(name: str, x: Any) -> bool:
    if x is not True and x is not False:
        fail(name, type(x).__name__ if isinstance(x, Tensor) else repr(x), "True or False")
    return bool(x)


def _word(name: str, x: Any, accepted: dict[str, str]) -> str:
    if not isinstance(x, str) or x not in accepted:
        fail(name, repr(x), ", ".join(accepted))
    return accepted[x]


def _warn_once(name: str) -> None:
    if name not in _unknown and not torch.compiler.is_compiling():
        _unknown.add(name)
        warnings.warn(f"{name}: unknown to gdn_codegen's ops, and ignored", stacklevel=5)


def renamed(own: dict[str, Any], others: dict[str, Any]) -> None:
    """Put keywords of other libraries among ours; refuse what is not done here, warn once of what nobody knows."""
    for name, x in others.items():
        if name in ALIASES:
            ours = ALIASES[name]
            if own[ours] is not None and own[ours] is not False:
                fail(name, f"both {name} and {ours}", f"one of them: {ours}")
            own[ours] = x
        elif name == "use_gate_in_kernel":
            if _flag(name, x):
                if own["gate"] == "linear":
                    fail(name, "True with gate='linear'", "gate='raw', or use_gate_in_kernel=False")
                own["gate"] = "raw"
        elif name == "use_beta_sigmoid_in_kernel":
            if _flag(name, x) and own["beta_form"] == "given":
                own["beta_form"] = "sigmoid"
        elif name == "cu_seqlens_cpu":
            _check_cpu_ends(x, own["cu_seqlens"])
        elif name in REFUSED:
            if x is not None and x is not False:
                fail(name, type(x).__name__ if isinstance(x, Tensor) else repr(x), REFUSED[name])
        else:
            _warn_once(name)


def _reads(*tensors: Tensor | None) -> bool:
    """Whether values may be looked at: where that waits for no device, or the caller debugs."""
    if torch.compiler.is_compiling():
        return False
    return os.environ.get("GDN_CODEGEN_CHECK") == "1" or all(x is None or x.device.type == "cpu" for x in tensors)


def _check_cpu_ends(x: Any, cu_seqlens: Any) -> None:
    if x is None:
        return
    if not isinstance(x, Tensor) or x.device.type != "cpu":
        fail("cu_seqlens_cpu", f"a tensor on {x.device}" if isinstance(x, Tensor) else type(x).__name__, "a tensor on the CPU")
    if not isinstance(cu_seqlens, Tensor) or x.shape != cu_seqlens.shape:
        fail("cu_seqlens_cpu", f"shape {tuple(x.shape)}", "a copy of cu_seqlens, which goes with it")
    if _reads(cu_seqlens) and x.tolist() != cu_seqlens.tolist():
        fail("cu_seqlens_cpu", x.tolist(), f"a copy of cu_seqlens: {cu_seqlens.tolist()}")


def _check_chunks(indices: Any, offsets: Any, cu_seqlens: Tensor | None, chunk_size: int | None) -> None:
    """Tables of chunks need not be given. Those that are must speak of this call's sequences."""
    for name, x, rank, form in (("chunk_indices", indices, 2, "[chunks, 2]"), ("chunk_offsets", offsets, 1, "[N + 1]")):
        if x is None:
            continue
        if not isinstance(x, Tensor) or x.dtype not in _INTEGERS:
            fail(name, x.dtype if isinstance(x, Tensor) else type(x).__name__, f"an int32 or int64 tensor {form}")
        if x.ndim != rank or (rank == 2 and x.shape[1] != 2):
            fail(name, f"shape {tuple(x.shape)}", form)
        if not isinstance(cu_seqlens, Tensor):
            fail(name, "a tensor without cu_seqlens", "both, or neither")
        if rank == 1 and x.shape != cu_seqlens.shape:
            fail(name, f"shape {tuple(x.shape)}", f"shape {tuple(cu_seqlens.shape)}, that of cu_seqlens")
        if not _reads(x, cu_seqlens):
            continue
        ends = cu_seqlens.tolist()
        lengths = [b - a for a, b in pairwise(ends)]
        for size in (chunk_size,) if chunk_size else CHUNKS:
            counts = [-(-n // size) for n in lengths]
            table: list[Any] = [[n, c] for n, count in enumerate(counts) for c in range(count)]
            if rank == 1:
                table = [sum(counts[:n]) for n in range(len(counts) + 1)]
            if x.tolist() == table:
                break
        else:
            fail(name, x.tolist() if x.numel() < 12 else f"{x.numel()} values",
                 f"the chunks of cu_seqlens, of {chunk_size or ' or '.join(map(str, CHUNKS))} tokens")


def _check_options(own: dict[str, Any]) -> None:
    for name in ("output_final_state", "use_qk_l2norm_in_kernel", "head_first", "state_v_first", "allow_neg_eigval"):
        _flag(name, own[name])
    n, size, schedule = own["checkpoint_chunks"], own["chunk_size"], own["schedule"]
    if isinstance(n, bool) or not isinstance(n, int) or n < 0:
        fail("checkpoint_chunks", repr(n), "a number of chunks, 0 for none")
    if size is not None and size not in CHUNKS:
        fail("chunk_size", repr(size), f"{', '.join(map(str, CHUNKS))}, or None to choose")
    if schedule is not None and not isinstance(schedule, (str, Schedule)):
        fail("schedule", type(schedule).__name__, "a name, a Schedule, or None to choose")
    if not isinstance(own["target"], str):
        fail("target", type(own["target"]).__name__, "a name")


def _layout(layout: Any, head_first: bool) -> str:
    if layout is None:
        return "bhtd" if head_first else "bthd"
    found = _word("layout", layout, LAYOUTS)
    if head_first and found != "bhtd":
        fail("head_first", f"True with layout={layout!r}", "head_first=True with layout 'bhtd', 'bnsd' or None")
    return found


def _beta_form(form: Any, twice: bool) -> str:
    found = _word("beta_form", form, BETAS)
    if not twice:
        return found
    if not found:
        fail("allow_neg_eigval", "True with beta as given", "use_beta_sigmoid_in_kernel=True beside it: twice the sigmoid")
    return "twice_sigmoid"


def _gate(own: dict[str, Any]) -> str:
    found = _word("gate", own["gate"], GATES)
    for name in ("A_log", "dt_bias"):
        if own[name] is not None and found != "raw":
            fail(name, f"a value with gate={own['gate']!r}", "None, or gate='raw' (use_gate_in_kernel=True)")
    if found == "raw" and own["A_log"] is None:
        fail("A_log", None, "a tensor [HV], which gate='raw' needs")
    return found


def _states(own: dict[str, Any]) -> tuple[bool, str]:
    """Whether the final state takes the initial one's place, and the dtype of states."""
    initial, final, indices, wish = (own[n] for n in ("initial_state", "final_state", "state_indices", "inplace_final_state"))
    if wish is not None:
        _flag("inplace_final_state", wish)
    in_place = wish if wish is not None else indices is not None and final is None
    if indices is not None and initial is None:
        fail("state_indices", "indices without initial_state", "both: the indices are slots of initial_state")
    if in_place and initial is None:
        fail("inplace_final_state", "True without initial_state", "both, or False")
    if in_place and final is not None and final is not initial:
        fail("final_state", "a buffer with inplace_final_state=True", "None, or inplace_final_state=False")
    held = initial if in_place else final
    if held is not None and not isinstance(held, Tensor):
        fail("initial_state" if in_place else "final_state", type(held).__name__, "a tensor")
    dtype = own["state_dtype"]
    if isinstance(dtype, str):
        dtype = getattr(torch, dtype, dtype)
    if dtype is not None and dtype not in DTYPES:
        fail("state_dtype", repr(dtype), ", ".join(map(str, DTYPES)))
    if held is None:
        return bool(in_place), DTYPES[dtype or torch.float32]
    if held.dtype not in DTYPES:
        fail("initial_state" if in_place else "final_state", held.dtype, ", ".join(map(str, DTYPES)))
    if dtype is not None and dtype != held.dtype:
        fail("state_dtype", dtype, f"{held.dtype}, that of the buffer for states")
    return bool(in_place), DTYPES[held.dtype]


def settled(own: dict[str, Any], others: dict[str, Any], decode: bool = False) -> Given:
    """One spelling of a call, or a ValueError naming the argument at fault."""
    if others:
        renamed(own, others)
    _check_options(own)
    for name in ("q", "k", "v", "g", "beta"):
        if not isinstance(own[name], Tensor):
            fail(name, type(own[name]).__name__, "a torch.Tensor")
    ends = own["cu_seqlens"]
    if ends is not None and not isinstance(ends, Tensor):
        fail("cu_seqlens", repr(ends), "an int32 or int64 tensor, by keyword: its place differs between versions of FLA")
    if own["chunk_indices"] is not None or own["chunk_offsets"] is not None:
        _check_chunks(own["chunk_indices"], own["chunk_offsets"], ends, own["chunk_size"])
    if torch.is_grad_enabled():
        for name in ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state"):
            if isinstance(own[name], Tensor) and own[name].requires_grad:
                fail(name, "a tensor that requires grad", "inference only: call under torch.no_grad(), or detach it")
    in_place, state_dtype = _states(own)
    return Given(own["q"], own["k"], own["v"], own["g"], own["beta"], own["A_log"], own["dt_bias"],
                 own["initial_state"], own["state_indices"], ends,
                 None if own["scale"] is None else float(own["scale"]), own["output_final_state"],
                 _gate(own), _beta_form(own["beta_form"], own["allow_neg_eigval"]), own["use_qk_l2norm_in_kernel"],
                 own["state_v_first"], state_dtype, own["checkpoint_chunks"], own["target"], own["chunk_size"],
                 _layout(own["layout"], own["head_first"]), own["schedule"], decode,
                 own["final_state"], own["out"], in_place)
