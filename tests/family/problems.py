"""A problem of any member, called through the member's ops, beside what its token recurrence gives in float64.

Calls have the argument names of `chunk_gated_delta_rule`. Where an op has others, its adapter renames them.
"""
from __future__ import annotations

from typing import Any

import torch
from members import Case, drawn, expected
from reference import rms_error

import gdn_codegen as ops
from gdn_codegen.algorithms import find

SIZES = {"C": 16, "K": 16, "V": 32}


def _product(few: bool, x: dict[str, Any], said: dict[str, Any]) -> Any:
    """Both steps of a token one after another."""
    tokens = 2 if said.get("layout") == "bhtd" else 1
    both = {n: torch.stack((x[n + "1"], x[n + "2"]), tokens + 1).flatten(tokens, tokens + 1) for n in ("k", "v", "beta")}
    op = ops.fused_recurrent_gated_delta_product if few else ops.chunk_gated_delta_product
    return op(x["q"], **both, g=x["g"], num_householder=2, **said)


def _gla(few: bool, x: dict[str, Any], said: dict[str, Any]) -> Any:
    return ops.fused_recurrent_gla(x["q"], x["k"], x["v"], x["g"], **said) if few else ops.chunk_gla(**x, **said)


def _lightning(few: bool, x: dict[str, Any], said: dict[str, Any]) -> Any:
    op = ops.fused_recurrent_simple_gla if few else ops.chunk_simple_gla
    return op(x["q"], x["k"], x["v"], g_gamma=x["g"], **said)


def _mamba(few: bool, x: dict[str, Any], said: dict[str, Any]) -> Any:
    """States of problems are [K, V]; mamba-ssm's are [V, K] unless the call says otherwise."""
    said = {"state_v_first": False, **said}
    if few:
        return _mamba_step(x, said)
    if "initial_state" in said:
        said["initial_states"] = said.pop("initial_state")
    if said.pop("output_final_state", False):
        said["return_varlen_states" if "cu_seqlens" in said else "return_final_states"] = True
    o = ops.mamba_chunk_scan_combined(x["v"], x["dt"], x["A"], x["k"], x["q"], said.pop("chunk_size", 16), x["D"], **said)
    own = said.get("final_state", said.get("initial_states"))
    return o if isinstance(o, tuple) else (o, own if "inplace_final_state" in said or "state_indices" in said else
                                           said.get("final_state"))


def _mamba_step(x: dict[str, Any], said: dict[str, Any]) -> Any:
    """The op updates states in place. What is not to be written is a copy."""
    state, packed = said.pop("initial_state"), "cu_seqlens" in said
    final = state.clone() if said.pop("output_final_state", False) else state
    said["state_batch_indices"] = said.pop("state_indices", None)
    said["disable_state_update"] = not said.pop("inplace_final_state", True)
    said.pop("seq_idx", None)
    x = {n: y[0] if packed and y.ndim > 1 else y for n, y in x.items()}
    o = ops.selective_state_update(final, x["v"], x["dt"], x["A"], x["k"], x["q"], x["D"], **said)
    return o[None] if packed else o, final


def _plain(chunk: str, step: str) -> Any:
    return lambda few, x, said: getattr(ops, step if few else chunk)(**x, **said)


#: By page: the call of its op for prompts, or of that for few tokens: (few, inputs, the call's other arguments) -> its results.
CALLS = {
    "gated_delta_rule": _plain("chunk_gated_delta_rule", "recurrent_gated_delta_rule"),
    "delta_rule": _plain("chunk_delta_rule", "fused_recurrent_delta_rule"),
    "simple_gla": _plain("chunk_simple_gla", "fused_recurrent_simple_gla"),
    "lightning_attention": _lightning,
    "mamba2": _mamba,
    "gated_delta_product": _product,
    "gla": _gla,
    "kimi_delta_attention": _plain("chunk_kda", "fused_recurrent_kda"),
    "gated_delta_rule_2": _plain("chunk_gdn2", "fused_recurrent_gdn2"),
    "rwkv7": _plain("chunk_rwkv7", "fused_recurrent_rwkv7"),
}


class Problem:
    """Sequences of a member. x: inputs as the page has them, packed, without a batch dim; S: initial states [N, HV, K, V]; gate:
    the input of log decays, "" for none of tokens. device: where tensors lie; tests on a GPU set it, and SIZES."""

    device = "cpu"

    def __init__(self, page: str, target: str, lengths: tuple[int, ...] = (9, 4), dtype: torch.dtype = torch.bfloat16,
                 few: bool = False, case: Case | None = None) -> None:
        """case: gates, heads and the like, with its own lengths; None for two value heads of slow gates."""
        self.page, self.target, self.few, self.case = page, target, few, case or Case(lengths, gates="slow")
        lengths = self.case.lengths
        x = {n: y.to(self.device) for n, y in drawn(page, self.case, find(page).trace(), SIZES).items()}
        self.S = x.pop("S")
        self.gate = next((n for n in ("w" if page == "rwkv7" else "g",) if n in x and x[n].ndim > 1), "")
        self.x = {n: y.to(dtype) if y.ndim == 3 and n != self.gate else y for n, y in x.items()}
        self.ends = self.integers([0, *lengths]).cumsum(0)
        self.numbers = torch.repeat_interleave(self.integers(lengths))[None]
        self.v = self.x["v" if "v" in x else "v1"]

    def integers(self, numbers: Any) -> torch.Tensor:
        """A tensor of integers, as slots are."""
        return torch.tensor(numbers, device=self.device)

    def first(self, tokens: int) -> Problem:
        """The first tokens of the first sequence, as a problem of its own."""
        made = Problem(self.page, self.target, (tokens,), few=self.few)
        made.x, made.S = {n: y[:tokens] if y.ndim > 1 else y for n, y in self.x.items()}, self.S[:1]
        return made

    def want(self) -> tuple[torch.Tensor, torch.Tensor]:
        """o [T, HV, V] and the final states, by the token recurrence."""
        o, final = expected(self.page, self.case, {n: y.cpu() for n, y in {**self.x, "S": self.S}.items()})
        return o.to(self.device), final.to(self.device)

    def call(self, inputs: dict[str, Any] | None = None, rows: bool = False, lie: Any = lambda y: y, **said: Any
             ) -> tuple[Any, ...]:
        """What the op gives. inputs: in place of those of x. rows: sequences of one length are rows, not a pack. lie: what
        becomes of inputs [B, T, heads, ...]."""
        n = len(self.case.lengths) if rows else 1
        x = {i: lie(y.reshape(n, -1, *y.shape[1:])) if y.ndim > 1 else y for i, y in {**self.x, **(inputs or {})}.items()}
        packed = {} if rows else {"cu_seqlens": self.ends, **({"seq_idx": self.numbers} if self.page == "mamba2" else {})}
        if self.page == "rwkv7" and self.few:
            said = {"scale": 1.0, **said}
        made: tuple[Any, ...] = CALLS[self.page](self.few, x, {"target": self.target, **packed, **said})
        return made

    def pool(self, slots: list[int]) -> torch.Tensor:
        """Slots of which some have the initial states, and the others sevens."""
        held = torch.full((8, *self.S.shape[1:]), 7.0, device=self.device)
        held[slots] = self.S
        return held

    def near(self, o: Any, state: Any = None, most: float = 5e-3) -> None:
        """Assert that results are those of the recurrence."""
        for got, want in zip((o, state), self.want(), strict=True):
            if got is not None:
                assert rms_error(got.reshape(want.shape), want) < most
