"""states_by_token: keeps and reads a state for each token of a sequence, for speculative decoding. A part of `caller_states`.

A chunk has one token, so the state after a chunk is that after a token. Where tiles have more rows, as those of products, the
others are empty. The state is stored to a tensor of index "checkpoint" that lies where integers of the caller say:
- slots: in the pool, at a slot for each token of each sequence.
- rows: in the caller's buffer, one row for each sequence.

accepted: a sequence starts from the slot of its last token that a verification accepted. parents: tokens form a tree. A token
then starts from the state after its parent (`resume`). frozen: the final state is not stored.
"""
from __future__ import annotations

from dataclasses import replace

from ...ir.core import Loop, Op, Program
from ...ir.types import Tensor
from ...schedule.contract import Contract

ACCEPTED, PARENTS, ROWS, ROW_INDICES = ("num_accepted_tokens", "retrieve_parent_token", "intermediate_states_buffer",
                                        "intermediate_state_indices")


def states_by_token(p: Program, c: Contract, slots: str, starts: dict[str, str]) -> Program:
    """`p` with states by token.

    slots: the tensor of the pool's slots. starts: the initial value of each carried state -> its tensor.
    """
    p = _numbers(p if p.sizes["C"] == 1 else replace(p, tokens=1), c, slots)
    (k,), tensors, transposed = p.kernels, {t.name: t for t in p.tensors}, {}
    if c.slots or c.frozen:  # the store after the last token is the final state, or there is none
        ends = {o.attr("tensor") for o in k.body if isinstance(o, Op) and o.kind == "store"}
        k = replace(k, body=tuple(o for o in k.body if isinstance(o, Loop) or o.kind != "store"))
        tensors = {n: t for n, t in tensors.items() if n not in ends}
    loop, body = p.walk, list(p.walk.body)
    for x in loop.carried:
        initial = tensors[starts[x.init]]
        transposed = {"transposed": True} if c.state_layout == "vk" and x.type.rank == 2 else {}
        if c.slots:
            kept = replace(initial, name=f"{x.name}_by_token", role="output", index="checkpoint", at=slots, over=initial.name)
        else:
            name = ROWS if len(loop.carried) == 1 else f"{x.name}_{ROWS}"
            kept = Tensor(name, "output", "checkpoint", "HV", initial.dims, at=ROW_INDICES)
        if not (c.slots or c.rows):
            break
        tensors[kept.name] = kept
        if c.parents:
            here = f"{x.name}_parent"
            body = [o.renamed({x.name: here}) if isinstance(o, Op) else o for o in body]
            body.insert(0, Op("resume", here, (x.name, x.init), tuple(sorted(
                {"tensor": kept.name, "parents": PARENTS, **transposed}.items())), x.type))
        body.append(Op("store", "", (x.next,), tuple(sorted({"tensor": kept.name, **transposed}.items()))))
    return replace(p, tensors=tuple(tensors.values()), kernels=(k,)).with_walk(replace(loop, body=tuple(body)))


def _numbers(p: Program, c: Contract, slots: str) -> Program:
    """`p` with the integers that say where states lie."""
    by_token = c.slots or c.accepted
    tensors = [replace(t, index="numbers", at=ACCEPTED if c.accepted else "") if t.name == slots and by_token else t
               for t in p.tensors]
    made = [(ACCEPTED, "number", c.accepted), (ROW_INDICES, "number", c.rows), (PARENTS, "numbers", c.parents)]
    tensors += [Tensor(name, "input", index, "HV", (), "int32") for name, index, has in made if has]
    return replace(p, tensors=tuple(tensors))
