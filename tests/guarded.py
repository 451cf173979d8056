"""Calls with tensors of all strides, each between guard bytes, so that a read or write outside a tensor shows."""
from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch
from reference import expected, problem, rms_error

from gdn_codegen.ops import chunk_gated_delta_rule

NAMES = ("q", "k", "v", "g", "beta")
STATES = ("initial_state", "final_state")
#: Every tensor of a call.
TENSORS = (*NAMES, *STATES, "out", "cu_seqlens")
#: Bytes on either side of a tensor, and what they hold: NaN in every float dtype.
GUARD, POISON = 4096, 0xFF
LENGTHS = (18, 0, 5)
#: How a tensor lies. slice, odd rows: rows 8 elements apart, or one. gaps: between heads; apart: between rows of a batch, or
#: slots. turned: heads before tokens. size 1: strides of dims of size 1 are anything. columns: the last two dims swapped.
#: expanded: one head for all.
KINDS = ("dense", "slice", "odd rows", "gaps", "apart", "turned", "size 1", "columns", "expanded")


@dataclass
class Laid:
    """A tensor amid guards: `x` lies in `memory`, which held `before`."""

    x: torch.Tensor
    memory: torch.Tensor
    mine: torch.Tensor  # which bytes are the tensor's
    before: torch.Tensor

    def touched(self, inside: bool) -> bool:
        """Whether bytes beside the tensor changed; with `inside`, any."""
        changed = self.memory != self.before
        return bool((changed if inside else changed & ~self.mine).any())


def strides(shape: tuple[int, ...], kind: str) -> tuple[int, ...]:
    """Of a tensor of this shape that lies in this way."""
    order = list(range(len(shape)))
    if kind == "turned":
        order[1], order[2] = order[2], order[1]
    if kind == "columns":
        order[-2], order[-1] = order[-1], order[-2]
    gap = {"slice": (1, 8), "odd rows": (1, 1), "gaps": (2, 24), "apart": (len(shape) - 1, 32)}.get(kind, (-1, 0))
    far, out = 1, [0] * len(shape)
    for place, d in enumerate(reversed(order)):
        far += gap[1] * (place == gap[0])
        out[d] = far
        far *= shape[d]
    if kind == "size 1":
        out = [s if n > 1 else 3 * (i + 1) for i, (s, n) in enumerate(zip(out, shape, strict=True))]
    if kind == "expanded":
        out[2] = 0
    return tuple(out)


def laid(x: torch.Tensor, kind: str = "dense", offset: int = 0) -> Laid:
    """`x` in memory of its own, from `offset` past a multiple of 16 bytes on."""
    far, each = strides(tuple(x.shape), kind), x.element_size()
    reach = 1 + sum((n - 1) * s for n, s in zip(x.shape, far, strict=True)) if x.numel() else 0
    memory = torch.full((2 * GUARD + 32 + reach * each,), POISON, dtype=torch.uint8, device=x.device)
    first = GUARD + offset + -memory.data_ptr() % 16
    assert first % each == 0 and x.device == memory.device
    y = torch.empty(0, dtype=x.dtype, device=x.device).set_(memory.untyped_storage(), first // each, x.shape, far)
    mine = torch.zeros(len(memory) // each, dtype=torch.bool, device=x.device)
    mine.as_strided(x.shape, far, first // each).fill_(True)
    mine = torch.cat([mine.repeat_interleave(each), mine.new_zeros(len(memory) % each)])
    y.copy_(x) if kind != "expanded" else y.select(2, 0).copy_(x.select(2, 0))
    return Laid(y, memory, mine, memory.clone())


def call(x: dict[str, Any], ways: dict[str, tuple[str, int]], device: str, in_place: bool, pool: bool, layout: str,
         **options: Any) -> None:
    """One call on tensors that lie in these ways; AssertionError where it is wrong or touches what it may not. x: a problem, with
    what is wanted; ways: tensor's name -> kind and address mod 16, of which the others are dense and 0."""
    made = {n: x[n][None] if layout == "bthd" else x[n][None].transpose(1, 2).contiguous() for n in NAMES}
    made["out"] = torch.full_like(made["v"], 3)
    made["cu_seqlens"] = torch.tensor([0, *itertools.accumulate(x["lengths"])], dtype=torch.int32)
    slots = torch.arange(len(x["lengths"]), dtype=torch.int32).flip(0)
    made["initial_state"] = x["S"].flip(0) if pool else x["S"]
    if pool:
        made["state_indices"] = slots
    if not in_place:
        made["final_state"] = torch.full_like(x["S"], 3)
    there = {n: laid(y.to(device), *ways.get(n, ())) for n, y in made.items()}
    o, S = chunk_gated_delta_rule(**{n: y.x for n, y in there.items()}, output_final_state=True, layout=layout,
                                  inplace_final_state=in_place, **options)
    written = {"out", STATES[not in_place]}
    for n, y in there.items():
        assert not y.touched(inside=n not in written), f"{ways}: memory of {n}, or beside it, was written"
    assert o.data_ptr() == there["out"].x.data_ptr() and S.data_ptr() == there[STATES[not in_place]].x.data_ptr()
    assert o.stride() == there["out"].x.stride()
    o, S = o[0].cpu() if layout == "bthd" else o[0].transpose(0, 1).cpu(), S.flip(0).cpu() if pool else S.cpu()
    for name, got, want in zip(("o", "state"), (o, S), x["want"], strict=True):
        assert rms_error(got, want) < 5e-3, f"{ways}: {name} is off by {rms_error(got, want)}"


def takes(name: str, kind: str, in_place: bool, pool: bool) -> bool:
    """Whether a call takes this tensor in this way; what is refused is tests/runtime/test_errors.py's."""
    written = name in ("out", "final_state") or (in_place and name == "initial_state")
    if name == "cu_seqlens":
        return kind == "dense"
    if name in STATES and pool:
        return kind in ("dense", "apart", "size 1")
    return not (kind == "expanded" and (written or name in STATES)) and not (kind == "columns" and name == "out")


def every_way(name: str, device: str = "cpu", sizes: tuple[int, int, int, int] = (1, 2, 32, 36),
              lengths: tuple[int, ...] = LENGTHS, dtype: torch.dtype = torch.float16, in_place: bool = False, pool: bool = False,
              layout: str = "bthd", **options: Any) -> int:
    """Calls with this tensor in every way and at every address mod 16: each way several times, as a first call settles how the
    next are done. sizes: H, HV, K, V. How many calls there were."""
    H, HV, K, V = sizes
    count = 0
    for kind in KINDS:
        if not takes(name, kind, in_place, pool):
            continue
        one = kind == "size 1"
        x = problem([3] if one else lengths, 1 if one else H, 1 if one else HV, K, V, dtype, gate=-0.3)
        if kind == "expanded":
            head = 2 if layout == "bthd" else 1  # in either layout the dim that is expanded is the third of the tensor
            x[name] = x[name][:, :1].expand_as(x[name]).clone() if head == 2 else x[name][:1].expand_as(x[name]).clone()
        x["want"] = expected(x)
        each = 4 if name in ("g", "beta", "cu_seqlens", *STATES) or dtype == torch.float32 else 2
        aligned = (0,) if pool and name in STATES else tuple(n for n in (0, 2, 4, 8) if n % each == 0)
        for offset in (aligned[-1], *aligned):
            call(x, {name: (kind, offset)}, device, in_place, pool, layout, **options)
            count += 1
    return count
