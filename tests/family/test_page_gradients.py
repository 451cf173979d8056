"""Gradients of pages of one's own by backward() on the op that `pages.compile` gives, beside autograd through recurrences."""
from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import gradients
import pytest
import torch
from torch import Tensor

from gdn_codegen import pages, targets
from gdn_codegen.ir.builder import algorithm, carried, cumsum, exp, last, lower, per_head, row_sum, sigmoid
from gdn_codegen.runtime import page_library
from gdn_codegen.runtime.build import Build
from gdn_codegen.runtime.call import gradient
from gdn_codegen.runtime.load import function, module
from gdn_codegen.runtime.page_op import op as page_op
from gdn_codegen.runtime.targets import runs
from gdn_codegen.schedule.contract import Contract
from gdn_codegen.targets import OWN

pytestmark = pytest.mark.skipif(not runs("triton", "cpu"), reason="Triton does not run here")
SMALL = dict(target="triton", chunk=16, head_dim_k=16, head_dim_v=32, dtype="float32")
LENGTHS, H, HV = (17, 0, 5), 1, 2


@algorithm(q="C K", k="C K", v="C V", g="C", u=per_head(1.0), S=carried("K V"), Z=carried("K V"))
def two_layers(q, k, v, g, u, S, Z, *, scale="K ** -0.5"):
    """Gated linear attention, and linear attention over what it gives. Both are outputs."""
    G = cumsum(g)
    D = exp(lower(G[:, None] - G[None, :], fill=-float("inf")))
    P = scale * (q @ k.T)
    o = scale * exp(G)[:, None] * (q @ S) + (P * D) @ v
    y = u * (scale * (q @ Z) + lower(P) @ o)
    S = exp(last(G)) * S + k.T @ (exp(last(G) - G)[:, None] * v)
    Z = Z + k.T @ o
    return o, y, S, Z


def layers_by_token(q, k, v, g, u, S, Z):
    o, y = [], []
    for t in range(len(q)):
        S = torch.exp(g[t]) * S + torch.outer(k[t], v[t])
        o.append(q[t] @ S * q.shape[1] ** -0.5)
        Z = Z + torch.outer(k[t], o[t])
        y.append(u * (q[t] @ Z) * q.shape[1] ** -0.5)
    return (*(torch.stack(x) if x else v[:0] for x in (o, y)), S, Z)


@algorithm(q="C K", v="C V", b="C", Z=carried("V"))
def sums(q, v, b, Z):
    """The gradient reads no state: the next Z is linear in Z, and no output depends on it but by a sum."""
    x = b[:, None] * v
    return sigmoid(row_sum(q))[:, None] * (x * x), Z + last(cumsum(x))


def sums_by_token(q, v, b, Z):
    x = b[:, None] * v
    return q.sum(1).sigmoid()[:, None] * x * x, Z + x.sum(0)


@algorithm(q="C K", k="C K", v="C V")
def no_state(q, k, v):
    """Each token by itself."""
    return sigmoid(row_sum(q * k))[:, None] * v


def no_state_by_token(q, k, v):
    return ((q * k).sum(1).sigmoid()[:, None] * v,)


RECURRENCES: dict[Any, Callable[..., tuple[Tensor, ...]]] = {
    two_layers: layers_by_token, sums: sums_by_token, no_state: no_state_by_token}


def problem(page: Any, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Inputs and initial states of a pack, by the op's arguments."""
    gen = torch.Generator().manual_seed(3)
    sizes, tokens = {"K": 16, "V": 32}, sum(LENGTHS)
    x = {}
    for n, (heads, dims) in page.inputs.items():
        shape = (1, tokens, {"H": H, "HV": HV}[heads], *(sizes[d] for d in dims[1:])) if "C" in dims else (HV,)
        x[n] = torch.randn(shape, generator=gen).to(dtype if len(dims) > 1 else torch.float32)
    if "g" in x:
        x["g"] = -x["g"].abs()
    one = len(page.states) == 1
    for n, dims in page.states.items():
        x["initial_state" if one else f"initial_{n}"] = torch.randn(len(LENGTHS), HV, *(sizes[d] for d in dims), generator=gen)
    return x


def expected(page: Any, x: dict[str, Tensor]) -> tuple[Tensor, ...]:
    """The op's results in float64, by the recurrence of each sequence and value head."""
    outputs: list[list[list[Tensor]]] = []
    start = 0
    states = list(page.states)
    for n, length in enumerate(LENGTHS):
        row = []
        for h in range(HV):
            mine = {i: x[i][h] if "C" not in dims else x[i][0, start:start + length, h * x[i].shape[2] // HV]
                    for i, (_, dims) in page.inputs.items()}
            mine |= {s: x["initial_state" if len(states) == 1 else f"initial_{s}"][n, h] for s in states}
            row.append(RECURRENCES[page](**mine))
        outputs.append(row)
        start += length
    count = len(outputs[0][0])
    tokens = [torch.cat([torch.stack([y[i] for y in row], 1) for row in outputs])[None] for i in range(count - len(states))]
    finals = [torch.stack([torch.stack([y[i] for y in row]) for row in outputs]) for i in range(count - len(states), count)]
    return *tokens, *finals


def loss_of(results: Any) -> Tensor:
    """A random sum of all results."""
    gen = torch.Generator().manual_seed(4)
    return sum((y.double() * torch.randn(y.shape, generator=gen, dtype=torch.float64)).sum() for y in results)  # type: ignore[return-value]


def errors(page: Any, which: slice = slice(None), vk: bool = False, **options: Any) -> dict[str, float]:
    """RMSE over RMS of the gradient by each argument, of a loss of the results in `which`. vk: states lie as [V, K]."""
    options = {**SMALL, **options}
    op = pages.compile(page, **options, contract=Contract(state_layout="vk" if vk else "kv"))
    x = problem(page, getattr(torch, options["dtype"]))
    leaves = {n: (y.mT.contiguous() if vk and n.startswith("initial") else y).requires_grad_() for n, y in x.items()}
    ends = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    results = op(**leaves, cu_seqlens=ends, output_final_state=True)
    first = len(results) - len(page.states)
    loss_of([y.mT if vk and i >= first else y for i, y in enumerate(results)][which]).backward()
    wide = {n: y.detach().double().requires_grad_() for n, y in x.items()}
    loss_of(expected(page, wide)[which]).backward()
    found = {}
    for n, y in leaves.items():
        assert y.grad is not None and y.grad.dtype == y.dtype and y.grad.shape == y.shape, n
        want = wide[n].grad
        if want is None or not want.any():
            assert not y.grad.any(), n
        else:
            found[n] = gradients.relative((y.grad.mT if vk and n.startswith("initial") else y.grad).double(), want)
    return found


@pytest.mark.parametrize("vk", [False, True], ids=["kv", "vk"])
def test_two_states(vk: bool) -> None:
    """One of which depends on the other, and two outputs; a number of a head, packs with ragged tails."""
    found = errors(two_layers, vk=vk)
    assert set(found) == {"q", "k", "v", "g", "u", "initial_S", "initial_Z"} and max(found.values()) < 1e-5, found


@pytest.mark.parametrize("which", [slice(0, 1), slice(1, 2), slice(3, 4)], ids=["o", "y", "the final Z"])
def test_one_result_of_two_states(which: slice) -> None:
    found = errors(two_layers, which)
    assert max(found.values()) < 1e-5, found


@pytest.mark.slow
@pytest.mark.parametrize("target", [t for t in OWN if t != "triton" and runs(t, "cpu")])
@pytest.mark.parametrize("page", [two_layers, sums], ids=lambda p: p.name)
def test_other_targets(page: Any, target: str) -> None:
    found = errors(page, target=target)
    assert max(found.values()) < 1e-5, found


def test_two_states_in_16_bits() -> None:
    found = errors(two_layers, dtype="bfloat16")
    assert max(found.values()) < 3e-2, found


@pytest.mark.parametrize("page", [sums, no_state], ids=lambda p: p.name)
def test_no_state_that_the_gradient_reads(page: Any) -> None:
    found = errors(page)
    assert max(found.values()) < 1e-5, found


def test_modules_of_two_states_check_themselves() -> None:
    """The self-check of the states before chunks and of the gradient, and of a gradient without states."""
    from gdn_codegen.derived_pages import beside
    for page, kind in ((two_layers, "states"), (two_layers, "gradient"), (sums, "gradient"), (no_state, "gradient")):
        found = module(Build(**SMALL, algorithm=beside(page, kind))).check.errors(torch.device("cpu"))
        assert found and all(e <= most for e, most in found.values()), (page.name, kind, found)


def test_without_gradients_it_is_the_generated_function() -> None:
    op, x = pages.compile(two_layers, **SMALL), problem(two_layers)
    plain = function(Build(**SMALL, algorithm=two_layers))
    assert op.__wrapped__ is plain and op.__doc__ == plain.__doc__
    ends = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    want = plain(**x, cu_seqlens=ends)
    leaves = {n: y.requires_grad_() for n, y in x.items()}
    with torch.no_grad():
        found = op(**leaves, cu_seqlens=ends)
    results = op(**leaves, cu_seqlens=ends)
    for got in (found, results):
        assert all(torch.equal(a, b) if b is not None else a is None for a, b in zip(got, want, strict=True))
    assert results[0].requires_grad and results[2] is None


@pytest.mark.parametrize("more, said", [
    (lambda x: {"final_Z": torch.empty_like(x["initial_Z"])}, "final_Z: got a tensor; accepted: None beside a tensor that re"),
    (lambda x: {"out_y": torch.empty_like(x["v"].detach())}, "out_y: got a tensor; accepted: None beside a tensor that re"),
    (lambda x: {"q": x["q"].to_sparse()}, "q: got torch.sparse_coo; accepted: a dense tensor")])
def test_arguments_without_a_gradient(more: Any, said: str) -> None:
    x = {n: y.requires_grad_() for n, y in problem(two_layers).items()}
    x |= {n: y[:1] for n, y in x.items() if n.startswith("initial")}
    with pytest.raises(ValueError, match=said):
        pages.compile(two_layers, **SMALL)(**{**x, **more(x)}, output_final_state=True)


def test_states_in_a_pool_have_no_gradient() -> None:
    op = pages.compile(two_layers, **SMALL, contract=Contract(pool=True))
    x = {n: y.requires_grad_() for n, y in problem(two_layers).items()}
    with pytest.raises(ValueError, match="contract: got states with pool; accepted: states without it beside a tensor that"):
        op(**x, state_indices=torch.arange(3, dtype=torch.int32))


def test_no_second_derivatives() -> None:
    x = {n: y.requires_grad_() for n, y in problem(no_state).items()}
    (y,) = pages.compile(no_state, **SMALL)(**x)
    (d,) = torch.autograd.grad(y.square().sum(), x["v"], create_graph=True)
    with pytest.raises(RuntimeError, match="computes no second derivatives"):
        d.sum().backward()


def test_equal_builds_have_one_op() -> None:
    b = Build(**SMALL, algorithm=two_layers)
    assert page_op(b) is page_op(Build(**SMALL, algorithm=two_layers))


def leaves(page: Any, **more: Any) -> dict[str, Any]:
    """Arguments of a call that is differentiated by all of them."""
    ends = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    return {**{n: y.requires_grad_() for n, y in problem(page).items()}, "cu_seqlens": ends, **more}


def gradients_of(call: Callable[..., Any], x: dict[str, Any]) -> tuple[Tensor, ...]:
    """Results of a call, then the gradients of a loss of all."""
    results = [y for y in call(**x) if y is not None]
    return *results, *torch.autograd.grad(loss_of(results), [y for y in x.values() if getattr(y, "requires_grad", False)])


@pytest.mark.parametrize("page", [two_layers, pytest.param(no_state, marks=pytest.mark.slow)], ids=lambda p: p.name)
def test_compiled_whole_in_both_directions(page: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The op is one node of the graph, and its gradient another: the same bits as eager calls, also in the first call of a
    process, before anything has looked for installed targets."""
    monkeypatch.setattr(targets, "_searched", [])
    more = {"output_final_state": True, "scale": 0.25} if page is two_layers else {}
    op, x = pages.compile(page, **SMALL), leaves(page, **more)
    whole = torch.compile(op, fullgraph=True, backend="aot_eager")
    assert all(map(torch.equal, gradients_of(whole, x), gradients_of(op, x)))
    with torch.no_grad():
        assert all(map(torch.equal, whole(**x), op(**x)))


@pytest.mark.slow
def test_many_ops_are_compiled() -> None:
    """torch compiles one code object eight times at most. Each op has one of its own."""
    x = {n: y.half() if n in "qkv" else y for n, y in problem(two_layers).items()}
    for i, (chunk, dtype, layout) in enumerate(product((16, 32), ("float16", "bfloat16", "float32"), ("bthd", "bhtd"))):
        op = pages.compile(two_layers, **{**SMALL, "chunk": chunk, "dtype": dtype}, layout=layout)
        y = {n: z.to(getattr(torch, dtype)) if n in "qkv" else z for n, z in x.items()}
        y = {n: z.transpose(1, 2).contiguous() if layout == "bhtd" and not n.startswith("initial") and z.ndim > 2 else z
             for n, z in y.items()}
        y = {n: z[:1] if n.startswith("initial") else z for n, z in y.items()}
        whole = torch.compile(op, fullgraph=True, backend="eager")
        assert torch.equal(whole(**y)[0], op(**y)[0]), i


def test_compiled_by_position() -> None:
    op, x = pages.compile(two_layers, **SMALL), problem(two_layers)
    x = {n: y[:1] if n.startswith("initial") else y for n, y in x.items()}
    args = [x.pop(n) for n in ("q", "k", "v", "g")]
    whole = torch.compile(lambda *a, **b: op(*a, **b), fullgraph=True, backend="aot_eager")
    got, want = whole(*args, **x), op(*args, **x)
    assert got[2] is got[3] is None and all(map(torch.equal, got[:2], want[:2]))


@pytest.mark.parametrize("page", [two_layers, pytest.param(sums, marks=pytest.mark.slow), no_state], ids=lambda p: p.name)
@pytest.mark.parametrize("save, dtype", [("states", torch.float32), ("rounded_states", torch.bfloat16)])
def test_saved_states(page: Any, save: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call keeps the states before each chunk, and its gradient computes none. Saved in float32 they give the same bits."""
    options, packed = {**SMALL, "dtype": "bfloat16"}, list[Tensor]()
    x = {**leaves(page), **{n: y.detach().bfloat16().requires_grad_() for n, y in problem(page).items() if n in "qkv"}}
    want = gradients_of(pages.compile(page, **options), x)
    op = pages.compile(page, save=save, **options)
    with torch.autograd.graph.saved_tensors_hooks(lambda y: packed.append(y) or y, lambda y: y):
        op(**x)
    slots = sum(LENGTHS) // 16 + len(LENGTHS)
    states = [y for y in packed if not any(y is z for z in x.values())]
    read = 2 if page is two_layers else 0  # the others' gradients read no state
    assert [y.shape[:2] for y in states] == [(slots, HV)] * read and all(y.dtype == dtype for y in states)
    ran = list[str]()
    monkeypatch.setattr(gradient, "_run", lambda *a, run=gradient._run: ran.append(a[3].HOST.tables.name) or run(*a))
    for call in (op, torch.compile(op, fullgraph=True, backend="aot_eager")):
        got = gradients_of(call, x)
        exact = all(map(torch.equal, got, want))
        near = [gradients.relative(a.detach().double(), b.detach().double()) for a, b in zip(got, want, strict=True) if b.any()]
        assert exact if save == "states" or not read else max(near) < 1e-2
    assert ran and not any("_states" in n for n in ran)


def test_words_of_save() -> None:
    with pytest.raises(ValueError, match="save: got 'all'; accepted: nothing, states, rounded_states"):
        pages.compile(two_layers, save="all", **SMALL)


def test_opcheck_of_pages() -> None:
    page, b = page_library.page, Build(**SMALL, algorithm=two_layers)
    page_op(b)
    x = leaves(two_layers)
    args = page_library.key_of(b), list(x.values()), list(x), [0.25], True
    assert set(torch.library.opcheck(page, args).values()) == {"SUCCESS"}
    plain = [y.detach() for y in x.values()]
    made = page(args[0], plain, *args[2:])
    given = [torch.randn_like(y) for y in made[1:]]
    more = given, [False, *[True] * len(given)], [], ["q", "initial_Z"]
    assert set(torch.library.opcheck(page_library.page_gradient, (args[0], plain, *args[2:4], *more)).values()) == {"SUCCESS"}


def test_compiled_calls_that_write_to_memory_break_the_graph() -> None:
    op, x = pages.compile(two_layers, **SMALL), problem(two_layers)
    x |= {n: y[:1] for n, y in x.items() if n.startswith("initial")}
    got, want = (torch.full_like(x["v"], float("nan")) for _ in range(2))
    torch.compile(op, backend="aot_eager")(**x, out_y=got)
    op(**x, out_y=want)
    assert torch.equal(got, want) and not got.isnan().any()


@pytest.mark.parametrize("compiled", [False, True])
def test_wrong_arguments_are_refused_as_python_does(compiled: bool) -> None:
    """Also beside a tensor that requires grad."""
    op, x = pages.compile(two_layers, **SMALL), leaves(two_layers)
    call = torch.compile(op, backend="aot_eager") if compiled else op
    for args, named, said in (((), {n: y for n, y in x.items() if n != "k"}, "missing 1 required positional argument: 'k'"),
                              ((), {**x, "surprise": 1}, "unexpected keyword argument 'surprise'"),
                              ((x["q"],), x, "multiple values for argument 'q'"),
                              ((x["q"],) * 20, {}, "takes from 4 to 14 positional arguments but 20 were given")):
        with pytest.raises(TypeError, match=said):
            call(*args, **named)
