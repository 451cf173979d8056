"""A call checks each argument once, in the package or in its module, and a further call of its kind checks no tensor."""
from collections import Counter

import pytest
import torch
from reference import problem

from gdn_codegen import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule, ops
from gdn_codegen.host import arguments
from gdn_codegen.runtime import load
from gdn_codegen.runtime.call import foreign_keywords, launch, normalise
from gdn_codegen.runtime.targets import runs
from gdn_codegen.targets import OWN

TARGET = next(t for t in OWN if runs(t, "cpu"))
#: Checks of a single argument, whose name is their first parameter.
CHECKS = [n for n, f in vars(arguments).items() if n.startswith("_check_") and f.__code__.co_varnames[:1] == ("name",)]


def given():
    """The tensors of a call with raw gates, a pool and an output: one of every kind."""
    x = problem([9, 12], 1, 2, 32, 32, seed=3)
    pool = torch.randn(4, 2, 32, 32, generator=torch.Generator().manual_seed(1))
    return dict({n: x[n][None] for n in ("q", "k", "v", "g", "beta")}, gate="raw", A_log=torch.rand(2), dt_bias=torch.rand(2),
                scale=0.5, initial_state=pool, state_indices=torch.tensor([2, 0]), cu_seqlens=torch.tensor([0, 9, 21]),
                out=torch.zeros_like(x["v"][None]), target=TARGET, chunk_size=16)


@pytest.fixture
def seen(monkeypatch):
    """(check, argument) -> how often it ran: of the package, and of the modules that calls take."""
    counts, watched = Counter(), []

    def watch(of):
        for check in CHECKS:
            run = vars(of).get(check)
            if run is not None and of not in watched:
                def counted(name, *rest, check=check, run=run):
                    counts[check, name] += 1
                    return run(name, *rest)
                monkeypatch.setattr(of, check, counted)
        watched.append(of)

    def loaded(b):
        m = load.module(b)
        monkeypatch.setattr(m.HOST, "plans", {})
        watch(m)
        return m

    for of in (normalise, foreign_keywords, launch, ops):
        watch(of)
    monkeypatch.setattr(launch, "module", loaded)
    launch.forget()
    return counts


@pytest.mark.parametrize("op", [chunk_gated_delta_rule, fused_recurrent_gated_delta_rule])
def test_a_first_call_checks_each_argument_once(op, seen):
    x = given()
    if op is fused_recurrent_gated_delta_rule:
        del x["chunk_size"]
    op(**x)
    assert max(seen.values()) == 1, [k for k, n in seen.items() if n > 1]
    for name in ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state"):
        assert seen["_check_tensor", name] == seen["_check_dtype", name] == 1, name
    assert seen["_check_integers", "cu_seqlens"] == seen["_check_integers", "state_indices"] == 1
    assert seen["_check_tensor", "out"] == seen["_check_number", "scale"] == 1


def test_a_further_call_of_its_kind_checks_no_tensor(seen):
    x = given()
    chunk_gated_delta_rule(**x)
    seen.clear()
    for n in (2, 3):
        chunk_gated_delta_rule(**x)
        assert seen == {("_check_number", "scale"): n - 1}


def test_a_call_after_admission_takes_the_plan_that_was_made_for_it(seen, monkeypatch):
    """Admission plans the call first, so that a bad one is refused before kernels compile."""
    from gdn_codegen.runtime import admit
    monkeypatch.setattr(admit, "wanted", lambda b, device: True)
    monkeypatch.setattr(admit, "_verdict", lambda *a: {"wrong": []})
    admit.forget()
    chunk_gated_delta_rule(**given())
    admit.forget()
    assert max(seen.values()) == 1 and seen["_check_tensor", "q"] == 1
