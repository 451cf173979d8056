"""What the op of Gated DeltaNet takes, as data: by feature, its line in docs/contract.md, and a call that shows it for any page.

A call compares what the op gives with the member's token recurrence in float64. REFUSED says which members have no such feature.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import lru_cache
from unittest import mock

import torch
from problems import CALLS, SIZES, Problem
from reference import rms_error
from torch.nn.functional import softplus
from torch.utils._python_dispatch import TorchDispatchMode

from gdn_codegen import mamba
from gdn_codegen.runtime import cache
from gdn_codegen.runtime.build import render
from gdn_codegen.runtime.call import foreign_keywords, known_members, launch, members, normalise
from gdn_codegen.runtime.call import positions as at_positions
from gdn_codegen.runtime.load import import_path

FEATURES: dict[str, Callable[[str, str], None]] = {}
#: Both, where a feature compares with them.
STATES = {"output_final_state": True}


def feature(text: str) -> Callable[[Callable[[str, str], None]], Callable[[str, str], None]]:
    """Registers a function of (page, target) under the text of its line."""
    return lambda f: FEATURES.setdefault(text, f)


# --- inputs ----------------------------------------------------------------------------------------------------------
@feature("packs (`cu_seqlens`, `cu_seqlens_cpu`, `max_seqlen`), initial and final states")
def packs(page, target):
    p = Problem(page, target, (17, 0, 5))
    for known in (dict(cu_seqlens_cpu=p.ends.cpu()), dict(max_seqlen=17), dict(max_seqlen=20)):
        p.near(*p.call(initial_state=p.S, **known, **STATES))


@feature("rows of a batch, no states")
def rows(page, target):
    p = Problem(page, target, (9, 9))
    p.S[:] = 0
    o, state = p.call(rows=True)
    assert state is None
    p.near(o)


@feature("float16, float32")
def dtypes(page, target):
    for dtype in (torch.float16, torch.float32):
        p = Problem(page, target, dtype=dtype)
        o, state = p.call(initial_state=p.S, chunk_size=16, **STATES)
        assert o.dtype == dtype
        p.near(o, state)


@feature("q, k in float32 beside v in 16 bits; all other inputs in 16 bits")
def mixed(page, target):
    p = Problem(page, target)
    p.x = {n: y.bfloat16() for n, y in p.x.items()}
    wide = {n: y.float() for n, y in p.x.items() if n in ("q", "k", "k1", "k2", "r")}
    p.near(*p.call(wide, initial_state=p.S, **STATES))


@feature("`scale`")
def scale(page, target):
    p = Problem(page, target)
    o, state = p.call(initial_state=p.S, scale=0.5, **STATES)
    p.near(o / 0.5 * (1.0 if page == "rwkv7" else SIZES["K"] ** -0.5), state)


@feature("`gate=\"linear\"`")
def linear(page, target):
    p = Problem(page, target)
    given = {p.gate: p.x[p.gate].exp()} if p.gate else {}
    p.near(*p.call(given, initial_state=p.S, gate="linear", **STATES))


@feature("`gate=\"raw\"` (`A_log`, `dt_bias`)")
def raw(page, target):
    p, gen = Problem(page, target), torch.Generator().manual_seed(1)
    shape = p.x[p.gate].shape if p.gate else (13, 2)
    x, A, bias = (torch.randn(s, generator=gen).to(p.device) for s in (shape, shape[1:2], shape[1:]))
    if p.gate:
        p.x[p.gate] = -A.exp().view(2, *[1] * (len(shape) - 2)) * softplus(x + bias)
    p.near(*p.call({p.gate: x} if p.gate else {}, initial_state=p.S, gate="raw", A_log=A, dt_bias=bias, **STATES))


@feature("beta before a sigmoid, or twice it")
def sigmoid(page, target):
    for form, most in (("sigmoid", 1), ("twice_sigmoid", 2)):
        p = Problem(page, target)
        given = {n: torch.log(y / (most - y)) for n, y in p.x.items() if n.startswith("beta")}
        p.near(*p.call(given, initial_state=p.S, beta_form=form, **STATES))


@feature("`use_qk_l2norm_in_kernel`")
def l2norm(page, target):
    p = Problem(page, target, dtype=torch.float32)
    given = {n: 3 * y for n, y in p.x.items() if n in ("q", "k", "k1", "k2")}
    p.near(*p.call(given, initial_state=p.S, use_qk_l2norm_in_kernel=True, **STATES))


@feature("`layout=\"bhtd\"`")
def heads_first(page, target):
    p = Problem(page, target)
    o, state = p.call(lie=lambda y: y.transpose(1, 2).contiguous(), initial_state=p.S, layout="bhtd", **STATES)
    p.near(o.transpose(1, 2), state)


@feature("views, such as slices of a fused projection")
def views(page, target):
    def sliced(y):
        whole = torch.full((*y.shape[:2], 3, *y.shape[2:]), float("nan"), dtype=y.dtype, device=y.device)
        whole[:, :, 1] = y
        return whole[:, :, 1]
    p = Problem(page, target)
    p.near(*p.call(lie=sliced, initial_state=p.S, **STATES))


@feature("`out`")
def out(page, target):
    p = Problem(page, target)
    mine = torch.full((1, len(p.v) + 2, *p.v.shape[1:]), 7.0, dtype=p.v.dtype, device=p.device)[:, 1:-1]
    o, state = p.call(initial_state=p.S, out=mine, **STATES)
    assert o is mine
    p.near(o, state)


# --- states ----------------------------------------------------------------------------------------------------------
@feature("states [V, K] or [K, V] (`state_v_first`)")
def state_order(page, target):
    p = Problem(page, target)
    o, state = p.call(initial_state=p.S.transpose(2, 3).contiguous(), state_v_first=True, **STATES)
    p.near(o, state.transpose(2, 3))


@feature("`state_dtype`, `final_state`")
def state_buffers(page, target):
    p = Problem(page, target)
    o, state = p.call(initial_state=p.S, state_dtype=torch.bfloat16, **STATES)
    assert state.dtype == torch.bfloat16
    p.near(o, state)
    mine = torch.full_like(p.S, float("nan"))
    o, state = p.call(initial_state=p.S, final_state=mine)
    assert state is mine
    p.near(o, state)


@feature("`inplace_final_state`")
def in_place(page, target):
    p = Problem(page, target)
    mine = p.S.clone()
    o, state = p.call(initial_state=mine, inplace_final_state=True)
    assert state is mine
    p.near(o, mine)


@feature("pools (`state_indices`), slot -1")
def pool(page, target):
    p = Problem(page, target, (9, 4, 3))
    o, states = p.call(initial_state=(mine := p.pool([3, 5, 0])), state_indices=p.integers([3, -1, 0]))
    assert states is mine and (o[0, 9:13] == 0).all() and (mine[[1, 2, 4, 6, 7]] == 7).all() and torch.equal(mine[5], p.S[1])
    (want, final), rest = p.want(), [*range(9), *range(13, 16)]
    assert rms_error(o[0, rest], want[rest]) < 5e-3 and rms_error(mine[[3, 0]], final[[0, 2]]) < 5e-3


@feature("`checkpoint_chunks`")
def checkpoints(page, target):
    p = Problem(page, target, (33, 16))
    o, state, marks = p.call(initial_state=p.S, checkpoint_chunks=1, chunk_size=16, **STATES)
    p.near(o, state)
    assert len(marks) == 3 and rms_error(marks[:1], p.first(16).want()[1]) < 5e-3
    assert rms_error(marks[1:2], p.first(32).want()[1]) < 5e-3 and torch.equal(marks[2:3], state[1:])


@feature("states at positions (`checkpoint_positions`, `checkpoint_slots`)")
def positions(page, target):
    p = Problem(page, target, (20, 9))
    mine = p.pool([3, 0])
    o, _ = p.call(initial_state=mine, state_indices=p.integers([3, 0]), checkpoint_positions=p.integers([[5, 18], [9, 1]]),
                  checkpoint_slots=p.integers([[1, 2], [4, -1]]))
    p.near(o, mine[[3, 0]])
    for tokens, slot in ((5, 1), (18, 2)):
        assert rms_error(mine[slot][None], p.first(tokens).want()[1]) < 5e-3
    assert rms_error(mine[4], p.want()[1][1]) < 5e-3 and (mine[[5, 6, 7]] == 7).all()
    mine, other = p.pool([3, 0]), torch.full_like(mine, 7.0)  # to memory of its own
    p.call(initial_state=mine, state_indices=p.integers([3, 0]), checkpoint_positions=p.integers([[5, 18], [9, 1]]),
           checkpoint_slots=p.integers([[1, 3], [0, -1]]), checkpoint_states=other)
    assert max(rms_error(other[slot][None], p.first(n).want()[1]) for n, slot in ((5, 1), (18, 3))) < 5e-3
    assert rms_error(torch.stack([mine[3], mine[0], other[0]]), p.want()[1][[0, 1, 1]]) < 5e-3
    assert (mine[[1, 2, 4, 5, 6, 7]] == 7).all() and (other[[2, 4, 5, 6, 7]] == 7).all()


@feature("`batch_invariant`")
def invariant(page, target):
    p = Problem(page, target, (9, 20))
    said = dict(batch_invariant=True, **STATES)
    o, state = p.call(initial_state=p.S, **said)
    p.near(o, state)
    alone = p.first(9)
    mine, final = alone.call(initial_state=alone.S, **said)
    assert torch.equal(mine[0], o[0, :9]) and torch.equal(final[0], state[0])


@feature("`schedule`, `chunk_size`; no tokens")
def choice(page, target):
    p = Problem(page, target, (40,))
    p.near(*p.call(initial_state=p.S, schedule="staged", chunk_size=32, **STATES))
    o, state = p.first(0).call(initial_state=p.S, **STATES)
    assert torch.equal(state, p.S) and not o.numel()


# --- few tokens ------------------------------------------------------------------------------------------------------
@feature("1 to 16 tokens of each sequence, in place in a pool")
def steps(page, target):
    for lengths in ((1, 1), (1, 5, 16, 0)):
        p, slots = Problem(page, target, lengths, few=True), [3, 0, 6, 1][:len(lengths)]
        mine = p.pool(slots)
        o = p.call(rows=len(lengths) == 2, initial_state=mine, state_indices=p.integers(slots))[0]
        p.near(o, mine[slots])


@feature("draft tokens: slots and accepted tokens, rows of a buffer")
def drafts(page, target):
    p, slots = Problem(page, target, (3, 2), few=True), [[5, 1, 0], [2, 7, -1]]
    mine = p.pool([1, 2])
    p.near(p.call(initial_state=mine, state_indices=p.integers(slots), num_accepted_tokens=p.integers([2, 1]))[0], mine[[0, 7]])
    kept = torch.full((2, 4, *p.S.shape[1:]), 7.0, device=p.device)
    o = p.call(initial_state=p.S, intermediate_states_buffer=kept, inplace_final_state=False)[0]
    p.near(o, torch.stack([kept[0, 2], kept[1, 1]]))


# --- torch -----------------------------------------------------------------------------------------------------------
@feature("`torch.compile(fullgraph=True)`, also with pools and `out`")
def compiled(page, target):
    p = Problem(page, target)
    slots = p.integers([3, 0])

    def whole(S, pool, out):
        o, state, *_ = p.call(initial_state=S * 1, **STATES)
        p.call(initial_state=pool, state_indices=slots, out=out)
        return o + 0, state + 0
    mine, o = p.pool([3, 0]), torch.full((1, *p.v.shape), 7.0, dtype=p.v.dtype, device=p.device)
    p.near(*torch.compile(whole, fullgraph=True, backend="aot_eager")(p.S, mine, o))
    p.near(o, mine[[3, 0]])


@lru_cache
def _stubbed(b):
    """A build's module as on a GPU: it looks at no values, and its kernels do nothing."""
    text = render(b)
    eager = 'looks = host.check or self.device.type == "cpu"'
    assert eager in text
    text = text.replace(eager, "looks = host.check")
    m = import_path(cache.write(cache.folder() / "texts" / f"stubbed_{cache.digest(text)}.py", text))
    m.HOST.launcher = lambda *a: lambda *b: None
    return m


def _waits(*a, **named):
    raise AssertionError("a value was read")


def rounds_of_capture() -> Iterator[int]:
    """Three rounds for calls as in the capture of a graph, with kernels that do nothing. The first round builds, the second
    settles again, and in the third calls are known. From the second on, reading a value of a tensor raises."""
    waits = dict.fromkeys(("item", "tolist", "cpu", "numpy", "nonzero", "__bool__", "__int__", "__index__", "__float__"), _waits)
    with ExitStack() as patched:
        for module in (normalise, foreign_keywords, members, known_members, at_positions, launch, mamba):
            for name, other in (("reads", lambda *a: False), ("module", _stubbed), ("admit", lambda *a: None)):
                if hasattr(module, name):
                    patched.enter_context(mock.patch.object(module, name, other))
        for n in range(3):
            if n < 2:
                launch.forget()
                known_members.forget()
            if n == 1:
                patched.enter_context(mock.patch.multiple(torch.Tensor, **waits))
            yield n
    launch.forget()
    known_members.forget()


@feature("capture by a CUDA graph: no call reads a value on the device")
def captured(page, target):
    few = Problem(page, target, (1, 1), few=True)
    p = Problem(page, target)
    slots = p.integers([3, 0])
    at = dict(checkpoint_positions=p.integers([[5], [4]]), checkpoint_slots=p.integers([[1], [-1]]))
    for _ in rounds_of_capture():
        p.call(initial_state=p.pool([3, 0]), state_indices=slots, out=torch.empty(1, *p.v.shape, dtype=p.v.dtype))
        p.call(initial_state=p.pool([3, 0]), state_indices=slots, **at)
        p.call(initial_state=p.pool([3, 0]), state_indices=slots, checkpoint_states=p.pool([3, 0]), **at)
        few.call(rows=True, initial_state=few.pool([3, 0]), state_indices=slots)


class Seen(TorchDispatchMode):
    """The calls of the package's torch ops."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple] = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op.namespace == "gdn_codegen":
            self.calls.append((op, args, kwargs or {}))
        return op(*args, **(kwargs or {}))


@feature("`torch.library.opcheck`")
def opcheck(page, target):
    p = Problem(page, target)
    with Seen() as seen:
        p.call(initial_state=p.S, **STATES)
        p.call(initial_state=p.pool([3, 0]), state_indices=p.integers([3, 0]))
    assert len(seen.calls) == 2
    for op, args, kwargs in seen.calls:
        torch.library.opcheck(op, args, kwargs)


@feature("fake tensors: shapes and dtypes without a kernel")
def fake(page, target):
    p = Problem(page, target)
    with torch._subclasses.FakeTensorMode() as mode:
        x = {n: mode.from_tensor(y) for n, y in p.x.items()}
        p.ends, p.numbers = mode.from_tensor(p.ends), mode.from_tensor(p.numbers)
        o, state, marks = p.call(x, initial_state=mode.from_tensor(p.S), state_v_first=True, checkpoint_chunks=1, chunk_size=16,
                                 **STATES)
    assert (o.shape[1:], o.dtype) == (p.v.shape, p.v.dtype) and marks.shape == (0, 2, SIZES["V"], SIZES["K"])
    assert (state.shape, state.dtype) == ((2, 2, SIZES["V"], SIZES["K"]), torch.float32)


@feature("gradients")
def gradients(page, target):
    p = Problem(page, target)
    x = p.x["r" if page == "rwkv7" else "q"].requires_grad_()
    p.call({})[0].float().square().sum().backward()
    assert x.grad is not None and x.grad.shape == x.shape and x.grad.dtype == x.dtype
    assert x.grad.isfinite().all() and (x.grad != 0).any()


_NO_GATE, _NO_BETA = "has no log decays of tokens among its inputs", "has no input beta"
#: (text of a feature, page) -> why its ops refuse it, in the words of the error.
REFUSED: dict[tuple[str, str], str] = {
    **{(n, page): _NO_GATE for n, f in FEATURES.items() if f in (linear, raw)
       for page in ("delta_rule", "lightning_attention", "mamba2")},
    **{(n, page): _NO_BETA for n, f in FEATURES.items() if f is sigmoid
       for page in ("simple_gla", "lightning_attention", "mamba2", "gla", "gated_delta_rule_2", "rwkv7")},
    **{(n, "rwkv7"): "has no input q" for n, f in FEATURES.items() if f is l2norm},
    **{(n, "mamba2"): "multiply C by it" for n, f in FEATURES.items() if f is scale},
    **{(n, "gated_delta_product"): "a token has several steps" for n, f in FEATURES.items() if f is drafts},
}


def table() -> list[str]:
    """The lines of the table in docs/contract.md, and of the list of reasons after it."""
    pages = [*CALLS]
    lines = ["| | " + " | ".join(f"`{p}`" for p in pages) + " |", "| --- |" + " --- |" * len(pages)]
    lines += [f"| {n} | " + " | ".join("-" if (n, p) in REFUSED else "yes" for p in pages) + " |" for n in FEATURES]
    why: dict[str, None] = dict.fromkeys(REFUSED.values())
    return lines + [""] + [f"- \"{w}\": " + ", ".join(dict.fromkeys(n for (n, _), y in REFUSED.items() if y == w)) for w in why]
