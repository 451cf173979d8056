"""A call after normalisation: what it asks for, a `Request`, and with that what its tensors are, a `Call`.

`normalise.settled` makes a Request of a call's options. `call_of` adds the facts of the tensors, once for all calls of one kind.
Choice, admission and launch take the Call.
"""
from __future__ import annotations

from dataclasses import dataclass, field, fields
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ... import derived_pages
from ...host.tensors import _FLOATS
from ...schedule.contract import PLAIN, Contract
from .tables import Extent

if TYPE_CHECKING:
    from .arguments import Tensors

#: The dtypes of kernels, and their names.
DTYPES = {dtype: name for name, dtype in _FLOATS.items()}
#: The dtypes of states that callers store and no kernel reads (stored_states.py).
STORED = (torch.float8_e4m3fn, torch.float8_e5m2)
#: Tokens of a chunk for calls that leave it open and have no row in a table.
DEFAULT_CHUNK = 64
#: Tokens of a chunk of a decoding step, and the most that a sequence may bring.
DECODE_CHUNK = 16
#: How the name of a page ends that also returns the states before its chunks (derived_pages.py).
SAVING = ".saving"
#: Sequences of one token each, by which a build is chosen that may not depend on the batch.
ANY_BATCH = 1 << 20


@dataclass(frozen=True)
class Request:
    """What a call asks for, in one spelling. These are also the options of the torch ops (runtime/torch_library.py).

    gate, beta_form: the contract's names of the forms of g and beta, "" for the page's own. l2norm, unit_keys: whether kernels
    divide rows of q and k by their norms, and whether rows of k have norm 1. in_place: whether the final state overwrites the
    initial one. by_token: the contract's words for states by token, joined by /. checkpoint_chunks: chunks from one checkpoint to
    the next, 0 for none. target: "auto" leaves it open. chunk_size, schedule: None leaves it open. decode: whether the call is a
    decoding step. batch_invariant: whether the bits of a sequence's result may depend on that sequence alone. aligned_positions:
    whether states at positions are states after chunks. longest: about how many tokens the longest sequence has, 0 where the
    host does not know; only the choice of a build and of the length of parts depends on it. forms: input forms of other inputs
    than g, beta, q and k, as a contract has them. rounded_states: whether states saved for a gradient have the dtype of q.
    """

    output_final_state: bool = False
    gate: str = ""
    beta_form: str = ""
    l2norm: bool = False
    unit_keys: bool = False
    state_v_first: bool = False
    state_dtype: str = "float32"
    in_place: bool = False
    by_token: str = ""
    checkpoint_chunks: int = 0
    target: str = "auto"
    chunk_size: int | None = None
    layout: str = "bthd"
    schedule: Any = None
    decode: bool = False
    algorithm: str = "gated_delta_rule"
    batch_invariant: bool = False
    aligned_positions: bool = False
    longest: int = field(default=0, compare=False)
    forms: str = ""
    rounded_states: bool = False

    @property
    def page(self) -> str:
        """The name of the page that the caller means."""
        return self.algorithm.removesuffix(SAVING)

    @property
    def saves(self) -> bool:
        """Whether the call also returns the states before chunks, for its gradient."""
        return self.algorithm.endswith(SAVING)

    @property
    def chunk(self) -> int | None:
        """Tokens of a chunk, if the call gives them, or if its states or its caller need them; else None."""
        known = self.checkpoint_chunks or self.batch_invariant or self.aligned_positions
        if self.by_token:
            return 1
        return DECODE_CHUNK if self.decode else self.chunk_size or (DEFAULT_CHUNK if known else None)

    @property
    def axes(self) -> tuple[int, int]:
        """The axes of tokens and of heads."""
        return (1, 2) if self.layout == "bthd" else (2, 1)


#: Names of what a Request has, in its order.
OPTIONS = tuple(f.name for f in fields(Request))


@dataclass(frozen=True)
class Call:
    """A call as all decisions about it see it. Calls that differ in size alone are equal.

    dtype, device: of the inputs. head_dims: K and V. packed: whether cu_seqlens is given. starts: whether initial states are.
    wanted: whether final states are computed. walks: sequences x value heads, also where the extent says nothing of the batch; 0
    where nobody counted them.
    """

    request: Request
    dtype: torch.dtype
    device: torch.device
    head_dims: tuple[int, int]
    extent: Extent = field(compare=False)
    contract: Contract = PLAIN
    packed: bool = False
    starts: bool = False
    wanted: bool = False
    walks: int = field(default=0, compare=False)


@lru_cache(maxsize=1024)
def _contract(x: Request, given: tuple[tuple[str, torch.dtype], ...], pool: bool, positions: bool, strided: bool) -> Contract:
    q = "l2norm" if x.l2norm else ""
    inputs = {"g": x.gate, "beta": x.beta_form, "q": q, "k": q or ("unit" if x.unit_keys else ""),
              **dict(Contract.parse(x.forms).inputs)}
    dtypes = {n: DTYPES[d] for n, d in given if d in DTYPES and d != torch.float32}
    return Contract(tuple(sorted((n, form) for n, form in inputs.items() if form)), tuple(sorted(dtypes.items())),
                    "vk" if x.state_v_first else "kv", x.state_dtype, pool, x.in_place, x.checkpoint_chunks > 0,
                    positions=positions, strided=strided,
                    **dict.fromkeys(filter(None, x.by_token.split("/")), True))


@dataclass(frozen=True)
class Inputs:
    """The inputs of a call, and what of them its build depends on. inputs: those of tokens. of_heads: those with one number or
    vector for each head, which modules take after them. numbers: by name, the dtypes of those with one number for each token or
    head. head_dims: K and V. heads: H and HV. rows: batch rows, and tokens of a row."""

    inputs: tuple[Tensor, ...]
    of_heads: tuple[Tensor | None, ...]
    numbers: tuple[tuple[str, torch.dtype], ...]
    dtype: torch.dtype
    head_dims: tuple[int, int]
    heads: tuple[int, int]
    rows: tuple[int, int]


def _strided(inputs: tuple[Tensor, ...], out: Tensor | None) -> bool:
    """True if kernels can read or write some tensor without a copy only if they get its strides."""
    return any(x is not None and not x.is_contiguous() and (x.ndim < 4 or x.stride(-1) == 1) for x in (*inputs, out))


def inputs_of(t: Tensors, x: Request) -> Inputs:
    """The inputs of Gated DeltaNet."""
    numbers: tuple[tuple[str, Tensor | None], ...] = (("g", t.g), ("beta", t.beta), ("A_log", t.A_log), ("dt_bias", t.dt_bias))
    q, v, (tokens, heads) = t.q.shape, t.v.shape, x.axes
    return Inputs((t.q, t.k, t.v, t.g, t.beta), (t.A_log, t.dt_bias) if x.gate == "raw" else (),
                  tuple((n, y.dtype) for n, y in numbers if y is not None), t.q.dtype, (q[3], v[3]), (q[heads], v[heads]),
                  (q[0], q[tokens]))


def call_of(t: Tensors, x: Request) -> Call:
    """The call of a Request on these tensors, of Gated DeltaNet."""
    return call_for(inputs_of(t, x), t, x)


def call_for(about: Inputs, t: Tensors, x: Request) -> Call:
    """The call of a Request on these inputs. t: its other tensors. If it is batch invariant, extent and contract say
    nothing of the batch: neither its size, nor the strides of views, which kernels would get. The host then copies views."""
    saved = derived_pages.find(x.algorithm).trace().role("output") if x.rounded_states else ()
    rounded = tuple((y.name, about.dtype) for y in saved if y.index == "slot")
    contract = _contract(x, about.numbers + rounded, t.state_indices is not None, t.checkpoint_positions is not None,
                         not x.batch_invariant and _strided(about.inputs, t.out))
    rows, tokens = about.rows
    sequences = rows if t.cu_seqlens is None else max(t.cu_seqlens.numel() - 1, 1)  # the module checks its shape
    extent = (ANY_BATCH, ANY_BATCH) if x.batch_invariant else (sequences, rows * tokens)
    packed = t.cu_seqlens is not None
    longest = 0 if x.batch_invariant else min(x.longest, rows * tokens)
    return Call(x, about.dtype, about.inputs[0].device, about.head_dims, Extent(*about.heads, *extent, packed, longest), contract,
                packed, t.initial_state is not None, x.in_place or x.output_final_state or t.final_state is not None,
                sequences * about.heads[1])
