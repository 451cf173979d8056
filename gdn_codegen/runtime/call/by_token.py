"""States by token: what a call that verifies draft tokens asks for, as words of the contract. Refuses contradictions.

vLLM gives a pool slot for each token of a sequence, and how many of its last tokens were accepted. SGLang and FlashInfer give a
buffer for the states after the tokens, and may leave the pool as it is. A tree of tokens has parents.
"""
from __future__ import annotations

from typing import Any

from ...host.tensors import _fail
from .arguments import Tensors

ACCEPTED, PARENTS, BUFFER, ROWS = ("num_accepted_tokens", "retrieve_parent_token", "intermediate_states_buffer",
                                   "intermediate_state_indices")
#: Arguments of a call with states by token; `state_indices` of rank 2 is another one.
ARGUMENTS = (ACCEPTED, PARENTS, BUFFER, ROWS)
_IN_STEPS = "None: recurrent_gated_delta_rule verifies draft tokens"


def absent(name: str, x: Any) -> None:
    """ValueError unless `x` is None, for an op that verifies no draft tokens."""
    if x is not None:
        _fail(name, type(x).__name__, _IN_STEPS)


def words(t: Tensors, in_place: bool, wanted: bool, decode: bool) -> str:
    """The contract's words for states by token, joined by /; "" for a call without them.

    in_place: whether the call writes states to the pool. wanted: whether it gives a final state. decode: whether it is a step.
    """
    if t.checkpoint_positions is not None:
        t = t._replace(intermediate_states_buffer=None)  # it is checkpoint_states
    given = [n for n in ARGUMENTS if getattr(t, n) is not None]
    by_token = t.state_indices is not None and t.state_indices.ndim == 2
    if not given and not by_token:
        return ""
    if not decode:
        _fail(given[0] if given else "state_indices", "a tensor" if given else "rank 2", _IN_STEPS if given else
              "rank 1: recurrent_gated_delta_rule verifies draft tokens")
    _refuse(t, by_token, in_place, wanted)
    slots, rows = by_token and in_place, t.intermediate_states_buffer is not None
    said = {"rows": rows, "slots": slots, "accepted": t.num_accepted_tokens is not None,
            "parents": t.retrieve_parent_token is not None, "frozen": not in_place and not wanted}
    return "/".join(n for n, x in said.items() if x)


def _refuse(t: Tensors, by_token: bool, in_place: bool, wanted: bool) -> None:
    """ValueError for arguments that do not go together."""
    rows = t.intermediate_states_buffer is not None
    slots = by_token and in_place
    if t.num_accepted_tokens is not None and not by_token:
        _fail(ACCEPTED, f"a tensor with state_indices of rank {t.state_indices.ndim}" if t.state_indices is not None else
              "a tensor without state_indices", "state_indices [N, tokens], of which it says where a sequence starts")
    if slots and rows:
        _fail(BUFFER, "a buffer beside a slot for each token", "one of them, or disable_state_update=True")
    if by_token and not in_place and wanted:
        _fail("state_indices", "rank 2 with a final state in other memory", "inplace_final_state=True, or no final state")
    if by_token and not in_place and t.num_accepted_tokens is None:
        _fail("state_indices", "rank 2, with nothing to write there", "rank 1, or num_accepted_tokens as well")
    if t.retrieve_parent_token is not None and not (slots or rows):
        _fail(PARENTS, "a tree whose states are not kept", "intermediate_states_buffer as well, or a slot for each token")
    if t.intermediate_state_indices is not None and not rows:
        _fail(ROWS, "a tensor without intermediate_states_buffer", "the buffer as well, of which these are rows")
