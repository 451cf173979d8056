"""Forms of inputs are data: a form from elsewhere works, and no pass knows the tensors that one brings."""
import re
from pathlib import Path

import pytest
import torch
from reference import problem, rms_error

import gdn_codegen
from gdn_codegen import algorithms
from gdn_codegen.input_forms import INPUT_FORMS, InputForm
from gdn_codegen.ir.interpret import Problem, interpret
from gdn_codegen.schedule import named
from gdn_codegen.schedule.contract import Contract
from gdn_codegen.targets import lower

PASSES = sorted((Path(gdn_codegen.__file__).parent / "passes").rglob("*.py"))
SIZES = {"C": 16, "K": 16, "V": 16}


def test_a_form_that_is_added_is_computed_by_the_kernels(monkeypatch):
    """Its value reads x twice, a number and a tensor of one number per head, in bfloat16."""
    monkeypatch.setitem(INPUT_FORMS, "bent", InputForm("{0} comes bent.", "-(x * x + 2) * exp(bend)", heads={"bend": "0.5"}))
    contract = Contract((("g", "bent"),), (("bend", "bfloat16"),))
    p = lower(algorithms.find("simple_gla").trace(), "triton", named("fused"), SIZES, "float32", contract=contract)
    (bend,) = (t for t in p.role("input") if t.index == "head")
    assert (bend.name, bend.dtype, bend.fill) == ("bend", "bfloat16", "0.5")

    x = problem([17, 0, 5], 1, 2, 16, 16, torch.float64)
    given = {n: x[n].double() for n in ("q", "k", "v")} | {"initial_state": x["S"], "bend": torch.tensor([0.5, -1.0]).double()}
    raw = torch.rand_like(x["g"].double())
    plain = lower(algorithms.find("simple_gla").trace(), "triton", named("fused"), SIZES, "float32")
    run = lambda p, **more: interpret(p, Problem([17, 0, 5], 1, 2), given | more, {"scale": 0.25})
    want = run(plain, g=-(raw * raw + 2) * torch.exp(given["bend"]))
    got = run(p, g=raw)
    assert want.keys() == got.keys() and all(rms_error(got[n], want[n]) < 1e-9 for n in want)


@pytest.mark.parametrize("path", PASSES, ids=lambda p: "/".join(p.parts[-2:]))
def test_no_pass_names_a_tensor_of_a_form(path):
    tensors = {n for form in INPUT_FORMS.values() for n in form.heads}
    assert tensors == {"A_log", "dt_bias"} and not tensors & set(re.findall(r"\w+", path.read_text()))
