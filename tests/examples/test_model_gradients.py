"""A model of transformers trains on generated ops: gradients of all its parameters are those of its own code."""
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch

from gdn_codegen.runtime.targets import runs

pytestmark = pytest.mark.slow
pytest.importorskip("transformers", "5.23", reason="needs transformers, 5.23")
TOLERANCE = 1e-4  # RMSE over RMS of a parameter's gradient, in float32


@pytest.fixture(scope="module")
def qwen():
    """The comparison of models, and the example of Qwen3-Next."""
    sys.path.insert(0, folder := str(Path(__file__).parents[2] / "examples"))
    yield import_module("model_comparison"), import_module("qwen3_next").EXAMPLE
    sys.path.remove(folder)


def trained(comparison, example, prompt=None):
    """One step of SGD with a function in place of the model's own: losses before and after it, gradients by name, and the number
    of calls of the function."""
    model = example.model().train()
    own, step = comparison.own_functions(example, model)
    ids, mask = comparison.prompts(example, model)
    batch = dict(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100), use_cache=False)
    with comparison.replaced(example, model, prompt or own, step) as calls:
        before = model(**batch).loss
        before.backward()
        grads = {n: p.grad.clone() for n, p in model.named_parameters()}
        torch.optim.SGD(model.parameters(), lr=0.05).step()
        after = model(**batch).loss
    return before.item(), after.item(), grads, calls["prompt"]


@pytest.fixture(scope="module")
def want(qwen):
    return trained(*qwen)


def errors(qwen, got, want):
    """The error of each gradient, by the parameter's name."""
    assert got.keys() == want.keys()
    return {n: qwen[0].rms_error(got[n], want[n]) for n in want}


def test_all_parameters_have_gradients(qwen, want):
    before, after, grads, calls = want
    assert after < before - 0.01 and calls == 2 * 3
    assert all(g.square().mean() > 0 for g in grads.values()) and any("A_log" in n for n in grads)


@pytest.mark.parametrize("target", [t for t in ("triton", "tilelang") if runs(t, "cpu")])
def test_a_step_is_that_of_its_own_code(qwen, want, target):
    got = trained(*qwen, qwen[0].generated(qwen[1], target)[0])
    assert got[3] == want[3] and got[:2] == pytest.approx(want[:2], rel=1e-5)
    apart = errors(qwen, got[2], want[2])
    assert max(apart.values()) < TOLERANCE, max(apart, key=apart.get)


def test_a_gradient_that_is_half_is_seen(qwen, want):
    own, _ = qwen[0].own_functions(qwen[1], qwen[1].model())
    half = lambda q, k, v, g, beta, **more: own(q, k, v, g=(g + g.detach()) / 2, beta=beta, **more)
    got = trained(*qwen, half)
    assert got[0] == want[0] and max(e for n, e in errors(qwen, got[2], want[2]).items() if "A_log" in n) > 0.1
