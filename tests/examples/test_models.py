"""Models of other packages on generated ops, and broken ops that the comparison must reject."""
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest
import torch

from gdn_codegen.runtime.targets import runs
from gdn_codegen.targets import OWN

pytestmark = pytest.mark.slow

FOLDER = Path(__file__).parents[2] / "examples"
#: The module that has the model, and the version of its package from which on it does. Older versions of transformers repeat
#: key heads of Qwen3-Next themselves and pass no state on: the example runs there, controls have nothing to break. FLA's models
#: are in flash-linear-attention, not in fla-core.
NEEDS = {"qwen3_next": ("transformers", "5.23"), "kimi_linear": ("transformers", "5.23"), "mamba2": ("transformers", "5.23"),
         "rwkv7": ("fla.models.rwkv7", None)}
CALLS, WITH_STATE = 12, 3  # three layers; a prompt at once, in two parts, and for generation
#: What runs by default. tests/family has the models' ops on all targets, and tests/integrations Qwen3-Next on TileLang.
OFTEN = (("qwen3_next", "pto"), ("kimi_linear", "pto"), ("mamba2", "tilelang"))
STEPS = 3 * 15  # generated tokens after the first, a layer each


@pytest.fixture(scope="module")
def comparison():
    """What the examples share."""
    sys.path.insert(0, str(FOLDER))
    yield import_module("model_comparison")
    sys.path.remove(str(FOLDER))


class Case:
    """An example with its model and the outcome of the model's own functions."""

    def __init__(self, comparison, name):
        self.comparison, self.example = comparison, import_module(name).EXAMPLE
        self.model = self.example.model()
        self.prompt, self.step = comparison.own_functions(self.example, self.model)
        self.want = comparison.reference(self.example, self.model)

    def compare(self, prompt=None, step=None):
        return self.comparison.compare(self.example, self.model, prompt or self.prompt, step or self.step, self.want)


#: RWKV-7's own code takes 20 s on a CPU.
@pytest.fixture(scope="module", params=[pytest.param(n, marks=pytest.mark.long if n == "rwkv7" else []) for n in NEEDS])
def case(request, comparison):
    module, version = NEEDS[request.param]
    pytest.importorskip(module, version, reason=f"needs {module}, {version or 'any version'}")
    return Case(comparison, request.param)


@pytest.mark.parametrize(("case", "target"), [
    pytest.param(model, t, marks=() if (model, t) in OFTEN else pytest.mark.long)
    for model in NEEDS for t in OWN if runs(t, "cpu")], indirect=["case"])
def test_logits_and_tokens_agree(case, target):
    ops = case.comparison.generated(case.example, target)
    v = case.comparison.compare(case.example, case.model, *ops, case.want, packs=True)
    assert v.agrees and (v.packed is not None and v.packed > 0) == bool(case.example.ends), v
    assert (v.calls, v.with_state, v.steps) == (CALLS, WITH_STATE, STEPS)


def test_no_token_is_a_near_tie(case):
    assert case.want.margin > 1000 * case.comparison.TOLERANCE


def test_the_cache_does_not_change_what_the_model_computes(case):
    assert case.comparison.rms_error(case.want.in_parts, case.want.logits) < case.comparison.TOLERANCE


def test_own_functions_agree(case):
    v = case.compare()
    assert v.agrees and (v.calls, v.with_state, v.steps) == (CALLS, WITH_STATE, STEPS), v


def zeros(own):
    def op(*args, **options):
        return tuple(x if x is None else torch.zeros_like(x) for x in own(*args, **options))
    return op


def nans(own):
    def op(*args, **options):
        o, S = own(*args, **options)
        return o * float("nan"), S
    return op


def no_initial_state(own):
    return lambda *args, **options: own(*args, **{n: None if n.startswith("initial_state") else x for n, x in options.items()})


def no_final_state(own):
    def op(*args, **options):
        o, S = own(*args, **options)
        first = options.get("initial_state", options.get("initial_states"))
        return o, S if S is None else torch.zeros_like(S) if first is None else first
    return op


# What each must fail: logits at once, logits in two parts, tokens.
FAILS = {zeros: (True, True, True), nans: (True, True, True), no_initial_state: (False, True, False),
         no_final_state: (False, True, True)}


@pytest.mark.parametrize("broken", FAILS, ids=lambda f: f.__name__)
def test_broken_op_is_rejected(case, broken):
    v, tolerance = case.compare(broken(case.prompt)), case.comparison.TOLERANCE
    assert not v.agrees and v.calls == CALLS
    assert (not v.logits <= tolerance, not v.in_parts <= tolerance, not v.tokens_equal) == FAILS[broken], v


def test_op_that_joins_packed_prompts_is_rejected(case):
    """As the model's own does, which ignores where they end."""
    v = case.comparison.compare(case.example, case.model, case.prompt, case.step, case.want, packs=True)
    assert v.logits == 0 and (not case.example.ends or (v.packed > 1e-3 and not v.agrees)), v


def test_broken_step_is_rejected(case):
    def silent(*args, **options):
        o = case.step(*args, **options)
        return torch.zeros_like(o) if isinstance(o, torch.Tensor) else (torch.zeros_like(o[0]), o[1])
    v = case.compare(step=silent)
    assert not v.agrees and v.logits == 0 and not v.tokens_equal and v.steps == STEPS, v


def test_model_is_left_as_it_was(case):
    module = sys.modules[type(case.comparison.linear_layers(case.example, case.model)[0]).__module__]
    name = case.example.prompt[0]
    own = getattr(module, name)
    with (pytest.raises(RuntimeError, match="inside"),
          case.comparison.replaced(case.example, case.model, case.prompt, case.step)):
        assert getattr(module, name) is not own
        raise RuntimeError("inside")
    assert getattr(module, name) is own


@pytest.fixture(scope="module")
def qwen(comparison):
    pytest.importorskip(*NEEDS["qwen3_next"], reason="needs transformers 5.23 or newer: the extra gdn_codegen[examples]")
    return Case(comparison, "qwen3_next")


def transposed_heads(own):
    """Value heads taken as if the group were the fast dimension."""
    def op(q, k, v, **options):
        groups = v.shape[2] // q.shape[2]
        return own(q.repeat(1, 1, groups, 1), k.repeat(1, 1, groups, 1), v, **options)
    return op


def test_transposed_heads_are_rejected(qwen):
    v, tolerance = qwen.compare(transposed_heads(qwen.prompt)), qwen.comparison.TOLERANCE
    assert v.logits > tolerance and v.in_parts > tolerance and not v.tokens_equal and not v.agrees


def test_op_that_is_never_called_is_rejected(qwen):
    own = {qwen.example.prompt[0]: qwen.prompt, qwen.example.step[0]: qwen.step}
    example = replace(qwen.example, prompt=("absent", ""), step=("absent_too", ""), also=own)
    v = qwen.comparison.compare(example, qwen.model, qwen.prompt, qwen.step, qwen.want)
    assert v.tokens_equal and v.calls == 0 and not v.agrees


@pytest.mark.parametrize(("broken", "code"), [(lambda op: op, 0), (zeros, 1)], ids=["correct", "zeros"])
def test_exit_code(qwen, broken, code, monkeypatch, capsys):
    monkeypatch.setattr(qwen.comparison, "generated", lambda example, target: (broken(qwen.prompt), qwen.step))
    monkeypatch.setattr(qwen.comparison, "TARGETS", OWN[:1])
    monkeypatch.setattr(qwen.comparison, "runs", lambda target, device: True)
    example = replace(qwen.example, ends="")  # the model's own function takes no packs
    assert qwen.comparison.main(example, ["--target", "all", "--device", "cpu"]) == code
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith(OWN[0]) and ("DISAGREES" in last) == bool(code)


def test_no_target_that_runs_here_is_a_failure(qwen, monkeypatch):
    monkeypatch.setattr(qwen.comparison, "runs", lambda target, device: False)
    assert qwen.comparison.main(qwen.example, ["--device", "cpu"]) == 1
