"""A transformers Qwen3-Next on generated ops, and broken ops that the comparison must reject."""
import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from gdn_codegen.runtime.targets import runs
from gdn_codegen.targets import OWN

pytestmark = pytest.mark.slow

EXAMPLE = Path(__file__).parents[2] / "examples" / "qwen3_next.py"
CALLS, WITH_STATE = 12, 3  # three layers; a prompt at once, in two parts, and for generation
STEPS = 3 * 7  # generated tokens after the first, a layer each


@pytest.fixture(scope="module")
def example():
    # Older ones repeat key heads themselves and pass no state on: the example runs there, controls have nothing to break.
    pytest.importorskip("transformers", "5.23", reason="needs transformers 5.23 or newer: the extra gdn_codegen[examples]")
    spec = importlib.util.spec_from_file_location("example_qwen3_next", EXAMPLE)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # dataclasses look it up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def model(example):
    return example.small_model()


@pytest.fixture(scope="module")
def want(example, model):
    return example.run(model, *example.prompts(model))


@pytest.fixture(scope="module")
def correct(example, model):
    """The model's own function: what broken ops start from."""
    return sys.modules[type(example.linear_layers(model)[0]).__module__].torch_chunk_gated_delta_rule


@pytest.mark.parametrize("target", [t for t in OWN if runs(t, "cpu")])
def test_logits_and_tokens_agree(example, model, want, target):
    v = example.compare(model, example.generated(target), want, example.generated(target, "recurrent"))
    assert v.agrees, v
    assert (v.calls, v.with_state, v.steps) == (CALLS, WITH_STATE, STEPS)


def test_no_token_is_a_near_tie(example, want):
    assert want.margin > 1000 * example.TOLERANCE


def test_correct_op_agrees(example, model, want, correct):
    v = example.compare(model, correct, want)
    assert v.agrees and (v.calls, v.with_state) == (CALLS, WITH_STATE), v


def zeros(correct):
    def op(*args, **options):
        o, S = correct(*args, **options)
        return torch.zeros_like(o), None if S is None else torch.zeros_like(S)
    return op


def nans(correct):
    def op(*args, **options):
        o, S = correct(*args, **options)
        return o * float("nan"), S
    return op


def no_initial_state(correct):
    return lambda *args, initial_state=None, **options: correct(*args, **options)


def no_final_state(correct):
    def op(*args, initial_state=None, **options):
        o, S = correct(*args, initial_state=initial_state, **options)
        return o, S if S is None else torch.zeros_like(S) if initial_state is None else initial_state
    return op


def transposed_heads(correct):
    """Value heads taken as if the group were the fast dimension."""
    def op(q, k, v, **options):
        groups = v.shape[2] // q.shape[2]
        return correct(q.repeat(1, 1, groups, 1), k.repeat(1, 1, groups, 1), v, **options)
    return op


# What each must fail: logits at once, logits in two parts, tokens.
FAILS = {zeros: (True, True, True), nans: (True, True, True), no_initial_state: (False, True, False),
         no_final_state: (False, True, True), transposed_heads: (True, True, True)}


@pytest.mark.parametrize("broken", FAILS, ids=lambda f: f.__name__)
def test_broken_op_is_rejected(example, model, want, correct, broken):
    v = example.compare(model, broken(correct), want)
    assert not v.agrees and v.calls == CALLS
    assert (not v.logits <= example.TOLERANCE, not v.in_parts <= example.TOLERANCE, not v.tokens_equal) == FAILS[broken], v


def test_op_that_is_never_called_is_rejected(example, model, want, correct, monkeypatch):
    monkeypatch.setattr(example, "linear_layers", lambda model: [])
    v = example.compare(model, correct, want)
    assert v.tokens_equal and v.calls == 0 and not v.agrees


def test_model_is_left_as_it_was(example, model, correct):
    module = sys.modules[type(example.linear_layers(model)[0]).__module__]
    own = module.torch_chunk_gated_delta_rule
    with pytest.raises(RuntimeError, match="inside"), example.replaced(model, correct):
        assert module.torch_chunk_gated_delta_rule is not own
        raise RuntimeError("inside")
    assert module.torch_chunk_gated_delta_rule is own


@pytest.mark.parametrize(("broken", "code"), [(lambda op: op, 0), (zeros, 1)], ids=["correct", "zeros"])
def test_exit_code(example, correct, broken, code, monkeypatch, capsys):
    monkeypatch.setattr(example, "generated", lambda target, name="chunk": broken(correct) if name == "chunk" else None)
    monkeypatch.setattr(example, "TARGETS", OWN[:1])
    monkeypatch.setattr(example, "runs", lambda target, device: True)
    assert example.main(["--target", "all"]) == code
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith(OWN[0]) and ("DISAGREES" in last) == bool(code)


def test_no_target_that_runs_here_is_a_failure(example, monkeypatch):
    monkeypatch.setattr(example, "runs", lambda target, device: False)
    assert example.main(["--target", "all"]) == 1
