"""Forms of inputs are data: a form from elsewhere works, and no pass knows the tensors that one brings."""
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from reference import problem, rms_error

import gdn_codegen
from gdn_codegen import algorithms, pages
from gdn_codegen.cli import main
from gdn_codegen.input_forms import INPUT_FORMS, InputForm, draws, reads, register
from gdn_codegen.ir.builder import algorithm, carried, exp
from gdn_codegen.ir.builder import lower as lower_triangle
from gdn_codegen.ir.differentiate import differentiate
from gdn_codegen.ir.interpret import Problem, interpret
from gdn_codegen.passes.abi.caller_inputs import caller_inputs
from gdn_codegen.runtime.build import Build
from gdn_codegen.runtime.load import function, module
from gdn_codegen.runtime.targets import runs
from gdn_codegen.schedule import named
from gdn_codegen.schedule.contract import Contract, ContractError
from gdn_codegen.targets import OWN, lower
from gdn_codegen.tools.cases import CASES, Case
from gdn_codegen.tools.verify import TOLERANCE, compare

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


#: A form that the package does not have: its number is e to the root of a decay's rate.
BENT = InputForm("{0} comes bent.", "-(x * x) * exp(bend)", heads={"bend": "0.0"}, drawn={"x": "normal", "bend": "log(rate)"})


@pytest.fixture
def bent():
    yield register("bent", BENT)
    del INPUT_FORMS["bent"]


def test_a_form_from_outside_builds_verifies_and_checks(bent):
    b = Build("triton", 16, algorithm="simple_gla", head_dim_k=16, head_dim_v=16, contract=Contract.parse("g=bent"))
    for case in CASES[:3]:
        assert max(compare(b, case).values()) <= TOLERANCE["float16"]
    m = module(b)
    assert "g comes bent." in getattr(m, b.function).__doc__ and set(m.check("cpu")) >= {"o", "final_state"}
    read = m.check.problem.reads["g"]
    m.check.problem.reads["g"] = lambda x, bend, **_: read(x, bend + 1)
    with pytest.raises(RuntimeError, match="gives wrong results on cpu: o off by"):
        m.check("cpu")
    m.check.problem.reads["g"] = read


@pytest.mark.parametrize("name, fields, says", [
    ("bent", 7, "form: got int"), ("be nt", {}, "name: got 'be nt'"), ("vk", {}, "name: got 'vk'"),
    ("float16", {}, "name: got 'float16'"), ("raw", {}, "name: got 'raw', which another form has"),
    ("bent", {"rows": True}, "rows: got True"), ("bent", {"heads": {"A_log": ""}}, "heads: got 'A_log'"),
    ("bent", {"heads": {"out": ""}}, "heads: got 'out'"), ("bent", {"heads": {"bend": "much"}}, "heads: got 'much' for bend"),
    ("bent", {"value": "x + y"}, "value: got 'y' in"), ("bent", {"value": "log2(x)"}, "value: got 'log2' in"),
    ("bent", {"value": "x +"}, "value: got 'x \\+'"), ("bent", {"value": "x if x else x"}, "value: got 'x if x else x'"),
    ("bent", {"vectors": ("y",)}, "vectors: got y"), ("bent", {"settings": ("y",)}, "settings: got y"),
    ("bent", {"drawn": {"y": "page"}}, "drawn: got y"), ("bent", {"drawn": {"x": "bend"}}, "drawn: got 'bend' in"),
    ("bent", {"drawn": {"bend": "page"}}, "drawn: got 'page' in")])
def test_forms_that_are_refused(name, fields, says):
    form = fields if fields == 7 else replace(BENT, **fields)
    before = dict(INPUT_FORMS)
    with pytest.raises(ValueError, match=f"^{says}.*; accepted: "):
        register(name, form)
    assert before == INPUT_FORMS


def test_a_pages_file_registers_its_form_for_the_command_line(tmp_path, capsys):
    """The file may run more than once."""
    source = Path(algorithms.find("simple_gla").fn.__code__.co_filename).read_text().replace("from ..ir", "from gdn_codegen.ir")
    text = f"from gdn_codegen.input_forms import InputForm, register\nregister('own', {BENT!r})\n"
    file = tmp_path / "mine.py"
    file.write_text(source.replace("\n\n@algorithm", f"{text}\n\n@algorithm").replace("def simple_gla(", "def mine("))
    for _ in range(2):
        assert main(["show", "--target", "triton", "--algorithm", f"{file}:mine", "--accept", "g=own", "--source"]) == 0
        assert "g comes bent." in capsys.readouterr().out
    del INPUT_FORMS["own"]


@pytest.mark.parametrize("form", [n for n, form in INPUT_FORMS.items() if "page" in form.sample("x")])
def test_samples_of_a_form_are_read_as_the_page_would_be_given(form):
    """Where a form's x is drawn from what the page would be given, its value is that again."""
    about = INPUT_FORMS[form]
    page = torch.rand(50, 3, dtype=torch.float64) * (-1 if form == "linear" else 1)
    x = eval(draws(about)["x"], {"torch": torch})(page, None, None)
    assert torch.allclose(eval(reads(about), {"torch": torch})(x), page, rtol=1e-6)


@algorithm(q="C K", k="C K", v="C V", a="HV C K", b="HV C K", w="HV C V", S=carried("K V"))
def rows_of_gates(q, k, v, a, b, w, S):
    """Token t: S <- S + (exp(a) k) (w v)^T; o = S^T (b q). The factor exp(a) is no decay."""
    u, x = exp(a) * k, w * v
    o = (b * q) @ S + lower_triangle((b * q) @ u.T) @ x
    S = S + u.T @ x
    return o, S


def of_rows(q, k, v, a, b, w, S):
    o = torch.zeros_like(v)
    for t in range(len(v)):
        S = S + torch.outer(torch.exp(a[t]) * k[t], w[t] * v[t])
        o[t] = S.T @ (b[t] * q[t])
    return o, S


@pytest.mark.slow
@pytest.mark.parametrize("target", [t for t in OWN if runs(t, "cpu")])
def test_forms_of_rows_of_numbers(target):
    """The bias of a raw gate with channels is a vector for each head, A_log a number. Other forms are as for one number."""
    accept = Contract.parse("a=raw,A_log=float16,b=sigmoid,w=twice_sigmoid")
    cases = Case((17, 0, 70)), Case((40, 40), heads=2, value_heads=4, batched=True)
    pages.verify(rows_of_gates, cases, target=target, contract=accept, reference=of_rows, head_dim_k=36, head_dim_v=64)
    module(Build(target, algorithm=rows_of_gates, contract=accept, head_dim_k=36, head_dim_v=64)).check("cpu")
    assert "dt_bias: [HV, 36] float32, one vector for each value head; zero where None." in function(
        Build(target, algorithm=rows_of_gates, contract=accept, head_dim_k=36, head_dim_v=64)).__doc__


def test_vectors_have_no_dtype_in_a_contract():
    with pytest.raises(ContractError, match="dtypes: got dt_bias='float16'; accepted: no dtype for a vector"):
        pages.source(rows_of_gates, contract=Contract.parse("a=raw,dt_bias=float16"))


@pytest.mark.parametrize("path", PASSES, ids=lambda p: "/".join(p.parts[-2:]))
def test_no_pass_names_a_tensor_of_a_form(path):
    tensors = {n for form in INPUT_FORMS.values() for n in form.heads}
    assert tensors == {"A_log", "dt_bias", "lower_bound"} and not tensors & set(re.findall(r"\w+", path.read_text()))


@pytest.mark.parametrize("form, left_out", [("safe", {"lower_bound"}), ("bounded", {"lower_bound"}), ("raw", set())])
def test_no_gradient_is_by_a_setting(form, left_out):
    """The others of the form have one."""
    page = caller_inputs(algorithms.find("kimi_delta_attention").trace(), Contract(inputs=(("g", form),)))
    heads = {t.name for t in page.role("input") if t.index == "head"}
    made = {t.name for t in differentiate(page).role("output")}
    assert made == {f"d_{n}" for n in {"q", "k", "v", "g", "beta", "initial_state"} | heads - left_out}
    assert left_out <= heads and {t.name for t in page.tensors if t.setting} == left_out
