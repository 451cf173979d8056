"""Normalises the options of a call to one spelling, with defaults. Refuses contradictions, and tensors that kernels cannot read.

Of tensors this looks at what a generated module cannot know, and at what the choice of a module depends on: the dtypes of q, k, v
and states, and the ranks of q and v. The module's plan checks all tensors (host/arguments.py).
"""
from __future__ import annotations

import os
from itertools import pairwise
from typing import Any, TypeVar

import torch
from torch import Tensor

from ... import algorithms
from ...host.arguments import _ANY_FLOAT, _check_chunks, _check_flag, _check_integers, _check_rank, _check_tensor
from ...host.tensors import _check_memory, _fail, _integer, _is_apart
from ...schedule import Schedule, named
from ..build import CHUNKS, LAYOUTS
from .arguments import BUFFER, FLAGS, IN_KERNELS, INPUTS, INTEGERS, Options, Tensors, name_of
from .by_token import words
from .request import DECODE_CHUNK, DTYPES, SAVING, STORED, Request

#: The words for forms of g and beta, with the contract's names of them. The first word is for what the page reads.
GATES = {"log": "", "linear": "linear", "raw": "raw"}
BETAS = {"given": "", **{form: form for form in algorithms.FORMS["beta"]}}
#: What a call keeps for its gradient beside its arguments: how the name of its page ends, and whether states are rounded.
SAVED = {"nothing": ("", False), "states": (SAVING, False), "rounded_states": (SAVING, True)}
_T = TypeVar("_T")
_INTEGERS = frozenset(Tensors._fields[n] for n in INTEGERS)


def check_located(name: str, x: Any) -> None:
    """ValueError for a tensor of the device meta, which has no memory. A call's other tensors have to be on its device."""
    if isinstance(x, Tensor) and x.device.type == "meta":
        _fail(name, "device meta", "a tensor with memory")


def check_plain(name: str, x: Any) -> None:
    """ValueError unless `x` is a dense torch.Tensor without a transform. name: the argument's."""
    if not isinstance(x, Tensor):
        if name == "cu_seqlens":
            _fail(name, repr(x), "an int32 or int64 tensor, by keyword: its place differs between versions of FLA")
        (_check_integers if name in _INTEGERS else _check_tensor)(name, x)
    _check_memory(name, x)
    if name == "q":
        check_located(name, x)


def check_floats(name: str, y: Tensor | None, x: Tensor, written: bool = False) -> None:
    """ValueError unless `y` is None, or floats on the device of the argument x. written: the call writes to `y`, so that no two
    of its indices may share an element."""
    if y is None:
        return
    check_plain(name, y)
    if y.device != x.device:
        _fail(name, f"device {y.device}", f"device {x.device}, that of x")
    if not y.is_floating_point():
        _fail(name, y.dtype, "a dtype of floats")
    if written and not _is_apart(y):
        _fail(name, f"strides {y.stride()}", "elements that do not overlap")


def shape_of(name: str, x: Any) -> torch.Size:
    """The shape of a tensor. ValueError for what has none."""
    if not isinstance(x, Tensor) or x.is_nested:
        check_plain(name, x)
    shape: torch.Size = x.shape
    return shape


def token_axis(others: dict[str, Any]) -> int:
    """The axis of tokens of a call with these keywords. What else they say of a layout is checked later."""
    return 2 if others.get("head_first") is True or others.get("layout") in ("bhtd", "bnsd") else 1


def is_step(shape: torch.Size, cu_seqlens: Any, others: dict[str, Any]) -> bool:
    """Whether a call is a decoding step if its op takes any number of tokens: sequences have few on average, or the bits of
    results may not depend on how many others have. shape: of a tensor of tokens. others: keywords of the call."""
    sequences = shape[:1].numel() if cu_seqlens is None else shape_of("cu_seqlens", cu_seqlens).numel() - 1
    few = len(shape) == 4 and shape[0] * shape[token_axis(others)] <= DECODE_CHUNK * sequences
    return few or is_batch_invariant(others.get("batch_invariant"))


def _kernels_dtype(name: str, dtype: Any) -> str:
    """The name of a dtype that kernels have. ValueError for another. name: the argument's."""
    if dtype not in DTYPES:
        _fail(name, dtype, ", ".join(map(str, _ANY_FLOAT)))
    return DTYPES[dtype]


def _states_dtype(name: str, dtype: Any) -> str:
    """The name of the dtype in which kernels have a call's states: float32 for those that are stored in float8."""
    if dtype not in DTYPES and dtype not in STORED:
        _fail(name, dtype, ", ".join(map(str, (*_ANY_FLOAT, *STORED))))
    return DTYPES.get(dtype, "float32")


def _check_dtypes(t: Tensors) -> None:
    """ValueError unless q, k and v have one dtype, or v has 16 bits and q and k are float32, as after a norm of their rows."""
    for name, y in (("q", t.q), ("k", t.k), ("v", t.v)):
        _kernels_dtype(name, y.dtype)
    wide = t.v.dtype != torch.float32
    for name, y in (("q", t.q), ("k", t.k)):
        if y.dtype != t.v.dtype and not (wide and y.dtype == torch.float32):
            _fail(name, y.dtype, f"{t.v.dtype}, that of v{', or torch.float32, which is rounded to it' if wide else ''}")


def _word(name: str, x: Any, accepted: dict[str, _T]) -> _T:
    if not isinstance(x, str) or x not in accepted:
        _fail(name, repr(x), ", ".join(accepted))
    return accepted[x]


def reads(*tensors: Tensor | None) -> bool:
    """Whether values may be read: all are on the CPU, so no read waits for a device, or GDN_CODEGEN_CHECK=1 asks for it. Tensors
    of other classes, and under a mode that sees torch's ops, may be fake."""
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
        return False
    return os.environ.get("GDN_CODEGEN_CHECK") == "1" or all(
        x is None or (x.device.type == "cpu" and type(x) in (Tensor, torch.nn.Parameter)) for x in tensors)


def check_cpu_ends(x: Any, cu_seqlens: Any) -> None:
    """ValueError unless `x`, a cu_seqlens_cpu, is None or a copy of cu_seqlens on the CPU.

    Values are compared where `reads` allows it.
    """
    if x is None:
        return
    if not isinstance(x, Tensor) or x.device.type != "cpu":
        _fail("cu_seqlens_cpu", f"a tensor on {x.device}" if isinstance(x, Tensor) else type(x).__name__, "a tensor on the CPU")
    if not isinstance(cu_seqlens, Tensor) or x.shape != cu_seqlens.shape:
        _fail("cu_seqlens_cpu", f"shape {tuple(x.shape)}", "cu_seqlens as well, and a copy of it here")
    if reads(cu_seqlens) and x.tolist() != cu_seqlens.tolist():
        _fail("cu_seqlens_cpu", x.tolist(), f"a copy of cu_seqlens: {cu_seqlens.tolist()}")


def check_chunks(indices: Any, offsets: Any, cu_seqlens: Tensor | None, chunk_size: int | None) -> None:
    """ValueError unless the tables of chunks, where they are given, are those of this call's cu_seqlens."""
    for name, x, rank, form in (("chunk_indices", indices, 2, "[chunks, 2]"), ("chunk_offsets", offsets, 1, "[N + 1]")):
        if x is None:
            continue
        _check_integers(name, x)
        if x.ndim != rank or (rank == 2 and x.shape[1] != 2):
            _fail(name, f"shape {tuple(x.shape)}", form)
        if not isinstance(cu_seqlens, Tensor):
            _fail(name, "a tensor without cu_seqlens", f"cu_seqlens as well, or no {name}")
        if rank == 1 and x.shape != cu_seqlens.shape:
            _fail(name, f"shape {tuple(x.shape)}", f"shape {tuple(cu_seqlens.shape)}, that of cu_seqlens")
        if not reads(x, cu_seqlens):
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
            _fail(name, x.tolist() if x.numel() < 12 else f"{x.numel()} values",
                 f"the chunks of cu_seqlens, of {chunk_size or ' or '.join(map(str, CHUNKS))} tokens")


def _layout(layout: Any, head_first: bool) -> str:
    if layout is None:
        return "bhtd" if head_first else "bthd"
    found = _word("layout", layout, LAYOUTS)
    if head_first and found != "bhtd":
        _fail("head_first", f"True with layout={layout!r}", "head_first=True with layout 'bhtd', 'bnsd' or None")
    return found


def _beta_form(form: Any, twice: bool) -> str:
    found = _word("beta_form", form, BETAS)
    if twice and not found:
        _fail("allow_neg_eigval", "True with beta as given", "True with use_beta_sigmoid_in_kernel=True: beta is then twice the "
                                                             "sigmoid")
    return "twice_sigmoid" if twice else found


def _gate(gate: Any, a_log: bool, dt_bias: bool) -> str:
    found = _word("gate", gate, GATES)
    for name, given in (("A_log", a_log), ("dt_bias", dt_bias)):
        if given and found != "raw":
            _fail(name, f"a value with gate={gate!r}", "None, or gate='raw' (use_gate_in_kernel=True)")
    if found == "raw" and not a_log:
        _fail("A_log", None, "a tensor [HV], which gate='raw' needs")
    return found


def is_batch_invariant(x: Any) -> bool:
    """Whether a call is batch invariant. x: its option; None leaves it to GDN_CODEGEN_BATCH_INVARIANT."""
    return os.environ.get("GDN_CODEGEN_BATCH_INVARIANT") == "1" if x is None else _check_flag("batch_invariant", x)


def _check_invariant(x: Request) -> None:
    """ValueError where a batch invariant call asks for what depends on the batch, or on where prompts are cut."""
    plan = named(x.schedule) if isinstance(x.schedule, str) else x.schedule
    if plan is not None and plan.partition not in (None, "pipelined"):
        _fail("schedule", f"{plan.name} with partition={plan.partition!r} and batch_invariant=True",
              "a schedule without parts that run side by side, because their number depends on the batch")
    if x.state_dtype != "float32":
        _fail("state_dtype", f"torch.{x.state_dtype} with batch_invariant=True",
              "torch.float32, because a state in 16 bits is rounded wherever a prompt is cut")


def _states(wish: Any, dtype: Any, initial: Any, final: Any, same: bool, indices: bool) -> tuple[bool, str]:
    """Whether the final state takes the initial one's place, and the dtype of states. initial, final: dtypes, None where
    there is none."""
    if wish is not None:
        _check_flag("inplace_final_state", wish)
    if initial is not None:
        _states_dtype("initial_state", initial)
    in_place = wish if wish is not None else final is not None if same else indices and final is None
    if indices and initial is None:
        _fail("state_indices", "indices without initial_state", "initial_state as well, because the indices are its slots")
    if in_place and initial is None:
        _fail("inplace_final_state", "True without initial_state", "True with an initial_state to overwrite, or False")
    if in_place and final is not None and not same:
        _fail("final_state", "a buffer with inplace_final_state=True", "None, or inplace_final_state=False")
    if same and not in_place and final is not None:
        _fail("final_state", "the buffer of initial_state", "a buffer of its own, or inplace_final_state=True")
    dtype = getattr(torch, dtype, dtype) if isinstance(dtype, str) else dtype
    wanted = "float32" if dtype is None else _states_dtype("state_dtype", dtype)
    held = initial if in_place or indices else final
    if held is None:
        return in_place, wanted
    found = _states_dtype("final_state", held)
    if indices and final not in (None, held):
        _fail("final_state", final, f"{held}, that of the pool")
    if dtype is not None and dtype != held:
        _fail("state_dtype", dtype, f"{held}, that of the buffer for states")
    return in_place, found


def _dtype_of_rows(t: Tensors, held: str) -> str:
    """The dtype of a buffer for states by token or at positions, which all states of the call have. held: that of the others, ""
    for none."""
    rows: Any = t[BUFFER]
    found = _kernels_dtype(name_of(BUFFER, t), rows.dtype)
    if held not in ("", found):
        _fail(name_of(BUFFER, t), rows.dtype, f"torch.{held}, that of the other states")
    return found


def request_of(t: Tensors, x: Options, decode: bool = False) -> Request:
    """The options in one spelling. ValueError names the option at fault."""
    for name in FLAGS:
        _check_flag(name, getattr(x, name))
    kept, chunk = _check_chunks("checkpoint_chunks", x.checkpoint_chunks, 0), _integer(x.chunk_size)
    if chunk is not None and (type(chunk) is not int or chunk not in CHUNKS):
        _fail("chunk_size", repr(x.chunk_size), f"{', '.join(map(str, CHUNKS))}, or None to choose")
    if x.schedule is not None and not isinstance(x.schedule, (str, Schedule)):
        _fail("schedule", type(x.schedule).__name__, "a name, a Schedule, or None to choose")
    if x.schedule == "" or not isinstance(x.target, str):
        _fail(*(("schedule", "''", "a name, a Schedule, or None to choose") if x.schedule == "" else
               ("target", type(x.target).__name__, "a name")))
    _word("save", x.save, SAVED)
    initial, final = (None if y is None else y.dtype for y in (t.initial_state, t.final_state))
    pool = t.state_indices is not None
    in_place, state_dtype = _states(x.inplace_final_state, x.state_dtype, initial, final, t.initial_state is t.final_state, pool)
    if t.intermediate_states_buffer is not None:
        held = in_place or pool or final is not None or x.state_dtype is not None or t.checkpoint_positions is not None
        state_dtype = _dtype_of_rows(t, state_dtype if held else "")
    by_token = words(t, in_place, x.output_final_state or t.final_state is not None, decode)
    if x.checkpoint_chunks and by_token:
        _fail("checkpoint_chunks", x.checkpoint_chunks, "0 beside states by token")
    asked = Request(
        output_final_state=x.output_final_state, gate=_gate(x.gate, t.A_log is not None, t.dt_bias is not None),
        beta_form=_beta_form(x.beta_form, x.allow_neg_eigval), l2norm=x.use_qk_l2norm_in_kernel, unit_keys=x.unit_keys,
        state_v_first=x.state_v_first, state_dtype=state_dtype, in_place=in_place, by_token=by_token,
        checkpoint_chunks=kept, aligned_positions=x.aligned_positions, target=x.target, chunk_size=chunk,
        layout=_layout(x.layout, x.head_first), schedule=x.schedule, decode=decode,
        batch_invariant=is_batch_invariant(x.batch_invariant), longest=x.longest)
    if asked.batch_invariant:
        _check_invariant(asked)
    return asked


def settled(t: Tensors, x: Options, decode: bool = False) -> Request:
    """The options of a call in one spelling, or a ValueError naming the argument at fault."""
    for n, (name, y) in enumerate(zip(Tensors._fields[:IN_KERNELS], t, strict=False)):
        if n < INPUTS or y is not None:
            check_plain(name, y)
    _check_dtypes(t)
    asked = request_of(t, x, decode)
    for name, y in (("q", t.q), ("v", t.v)):
        if y.ndim != 4:  # then K or V is not known
            _check_rank(name, y, 4, asked.layout)
    return asked
