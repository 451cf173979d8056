"""Calls whose gradient has no build are refused at the forward call, before kernels run."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from problems import Problem
from torch import Tensor

from gdn_codegen import algorithms, chunk_gated_delta_rule, chunk_rwkv7, family, pages
from gdn_codegen.runtime.call import gradient, gradient_builds, known_members, launch
from gdn_codegen.runtime.targets import runs

pytestmark = pytest.mark.skipif(not runs("triton", "cpu"), reason="Triton does not run here")
NONE = r"target: got '.*'; accepted: a target that has a gradient of \w+ with K = 32, V = 32 in float32 \(too large\)"


@pytest.fixture
def none_fits(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """No build of a gradient fits. Those of calls do. What was asked for is listed."""
    asked: list[Any] = []
    monkeypatch.setattr(gradient_builds, "unfit", lambda b: asked.append(b) or "too large")
    gradient_builds._fitting.cache_clear()
    gradient._built.clear()
    yield asked
    gradient_builds._fitting.cache_clear()
    gradient._built.clear()


def inputs(T: int = 5, K: int = 32, V: int = 32) -> dict[str, Tensor]:
    q, k, v = (torch.randn(1, T, 2, n) / 8 for n in (K, K, V))
    return {"q": q, "k": k, "v": v, "g": -torch.rand(1, T, 2), "beta": torch.rand(1, T, 2)}


def delta(**x: Any) -> Any:
    return family.chunk_delta_rule(**{n: y for n, y in x.items() if n != "g"})


@pytest.mark.parametrize("op", [chunk_gated_delta_rule, delta])
@pytest.mark.parametrize("save", ["nothing", "states"])
def test_a_call_of_an_op(op: Callable[..., Any], save: str, none_fits: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """No kernel has run. The second call of a kind searches no more."""
    x = inputs()
    x["v"].requires_grad_()
    launch.forget()
    known_members.forget()
    with monkeypatch.context() as m:
        m.setattr("gdn_codegen.runtime.call.launch.serves", lambda *_: pytest.fail("a kernel was asked for"))
        with pytest.raises(ValueError, match=NONE):
            op(**x, save=save)
        searched = len(none_fits)
        assert searched
        with pytest.raises(ValueError, match=NONE):
            op(**x, save=save)
        assert len(none_fits) == searched
    with torch.no_grad():
        o = op(**x)[0]
    assert torch.equal(op(**{**x, "v": x["v"].detach()})[0], o)


def test_the_search_is_made_once_for_a_kind_of_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """And again once a build was refused, so that perhaps no other is left."""
    found: list[str] = []
    theirs = gradient.builds_for
    monkeypatch.setattr(gradient, "builds_for", lambda *args: found.append(args[0]) or theirs(*args))
    gradient._built.clear()
    x = {n: y.requires_grad_() for n, y in inputs().items()}
    for _ in range(2):
        chunk_gated_delta_rule(**x)
    assert found == ["gated_delta_rule"]
    chunk_gated_delta_rule(**{n: y.detach().double().float().requires_grad_() for n, y in inputs(7).items()})
    assert len(found) == 2, "of another length"
    monkeypatch.setitem(gradient_builds.refused.__globals__["_refused"], ("a build", "a device"), "wrong")
    chunk_gated_delta_rule(**x)
    assert len(found) == 3


def test_a_page_of_ones_own(none_fits: list[Any]) -> None:
    """Its op refuses the call, too."""
    op = pages.compile(algorithms.find("delta_rule"), target="triton", head_dim_k=32, head_dim_v=32, chunk=16, dtype="float32")
    x = {n: y for n, y in inputs().items() if n != "g"}
    op(**x)
    x["q"].requires_grad_()
    with pytest.raises(ValueError, match=NONE):
        op(**x)


@pytest.mark.long
def test_sizes_that_have_no_gradient() -> None:
    """Of RWKV-7 on PTO."""
    if not runs("pto", "cpu"):
        pytest.skip("needs PTO's simulator")
    p = Problem("rwkv7", "pto", (5,), dtype=torch.float32)
    x = {n: torch.zeros(1, 5, 2, 132 if n == "v" else 256) for n in p.x}
    x["v"].requires_grad_()
    with pytest.raises(ValueError, match=r"'pto'; accepted: .* rwkv7 with K = 256, V = 132 in float32 \(.*UB has"):
        chunk_rwkv7(*(x[n] for n in ("r", "w", "k", "v", "a", "b")), target="pto")
