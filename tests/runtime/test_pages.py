"""Pages of one's own: what is refused, and what an unusual one makes."""
import re
from dataclasses import replace
from math import inf

import pytest
import torch

from gdn_codegen import algorithms
from gdn_codegen.cli import main
from gdn_codegen.ir.builder import algorithm, carried
from gdn_codegen.ir.decays import log_decays
from gdn_codegen.runtime.build import Build, render
from gdn_codegen.runtime.load import function
from gdn_codegen.runtime.targets import runs
from gdn_codegen.schedule import Schedule
from gdn_codegen.schedule.contract import Contract
from gdn_codegen.targets import OWN
from gdn_codegen.tools.cases import Case, inputs
from gdn_codegen.tools.verify import reference, rms_error, run

HERE = [t for t in OWN if runs(t, "cpu")]
HEAD = '''import torch
from gdn_codegen.ir.builder import algorithm, carried, cumsum, exp, last, lower, maximum, row_sum, valid

'''


def file(tmp_path, text, name="mine"):
    path = tmp_path / f"{name}.py"
    path.write_text(HEAD + text, encoding="utf-8")
    return f"{path}:{name}"


def page(body="o = q @ S + v\n    return o, S", parameters="q, v, S", dims='q="C K", v="C V", S=carried("K V")', name="mine"):
    return f'@algorithm({dims})\ndef {name}({parameters}):\n    """A page."""\n    {body}\n'


# --- what a chunk hands on as it is ----------------------------------------------------------------------------------
PAGES = {
    "same": ("o = q @ S + v\n    return o, S", "S", (("o", "S"),)),
    "same apart": ("o = q @ S + v\n    return o, S", "S", (("S",), ("o",))),
    "swapped": ("o = q @ A + v\n    return o, B, A", "AB", (("o", "A", "B"),)),
    "shifted": ("o = q @ A + v\n    N = 0.5 * B + q.T @ v\n    return o, B, N", "AB", (("o", "A", "B"),)),
    "one for both": ("o = q @ A + v\n    N = B + q.T @ v\n    return o, N, N", "AB", (("o", "A", "B"),)),
    "an input": ("o = q @ S\n    return o, v, S", "S", (("o", "same_v", "S"),)),
}


@pytest.mark.slow
@pytest.mark.parametrize("target", HERE)
@pytest.mark.parametrize("name", PAGES)
def test_values_may_be_handed_on_as_they_are(name, target, tmp_path):
    body, states, kernels = PAGES[name]
    dims = 'q="C K", v="C V", ' + ", ".join(f'{s}=carried("K V")' for s in states)
    spec = file(tmp_path, page(body, ", ".join(("q", "v", *states)), dims))
    b = Build(target, 16, algorithm=spec, schedule=Schedule("own", kernels), head_dim_k=16, head_dim_v=16)
    case = Case((20, 0, 40))
    x = inputs(b, b.page.trace(), case)
    want, got = reference(b, case, x, 16), run(b, case, x)
    assert max(rms_error(got[n], want[n]) for n in want) < 1e-3


SUMS = {"summed": "n = valid(exp(row_sum(k * k)))", "of sums": "n = valid(exp(valid(row_sum(k * k)) + row_sum(k)))",
        "with an input": "n = valid(exp(row_sum(k * k)) + b)"}


@pytest.mark.slow
@pytest.mark.parametrize("target", HERE)
@pytest.mark.parametrize("what", SUMS)
def test_sums_along_rows_may_end_with_a_sequence(what, target, tmp_path):
    """And what comes of them. Of exp(k) and exp(v) rows past the end are ones, so the state shows which rows n has there."""
    body = f"""{SUMS[what]}
    E = exp(k)
    U = n[:, None] * exp(v)
    o = lower(q @ E.T) @ U + q @ S + b[:, None] * v
    return o, S + E.T @ U"""
    spec = file(tmp_path, page(body, "q, k, v, b, S", 'q="C K", k="C K", v="C V", b="C", S=carried("K V")'))
    b = Build(target, 32, algorithm=spec, schedule=Schedule("own", (("o", "S"),)), head_dim_k=16, head_dim_v=16)
    case = Case((20, 0, 40, 64, 1))
    x = inputs(b, b.page.trace(), case)
    want, got = reference(b, case, x), run(b, case, x)
    assert max(rms_error(got[n], want[n]) for n in want) < 1e-3


# --- what a page may be ----------------------------------------------------------------------------------------------
SCALED = "o = scale * (q @ S) + v\n    return o, S"
BAD = {
    "syntax": ("def mine(:\n    pass\n", r"mine\.py.* fails in line 4 \(SyntaxError"),
    "import": ("import no_such_module\n", r"mine\.py.* fails in line 4 \(ModuleNotFoundError: .*no_such_module"),
    "raises": ("1 / 0\n", r"mine\.py.* fails in line 4 \(ZeroDivisionError"),
    "exits": ("raise SystemExit(0)\n", r"mine\.py.* fails in line 4 \(SystemExit"),
    "decorator": (page(dims='q="C K"'),
                  r"mine\.py.* fails in line \d+ \(TypeRuleError: @algorithm of mine \(mine\.py, line \d+\): it names q"),
    "name": (page("o = q @ Z\n    return o, S"), r"mine \(mine\.py, line 7\): got NameError: name 'Z'.*; accepted: "),
    "zero": (page("x = 1 / 0\n    return q, S"), r"mine \(mine\.py, line 7\): got ZeroDivisionError: .*; accepted: "),
    "torch": (page("o = torch.exp(q)\n    return o, S"), r"mine \(mine\.py, line 7\): got TypeError: .*; accepted: "),
    "type rule": (page("o = q @ v\n    return o, S"), r"mine \(mine\.py, line 7\): matmul: contracted dims"),
    "transposed": (page("o = q @ S\n    return o, S.T"), r"got x\.T among what it returns; accepted: "),
    "default name": (page(SCALED, 'q, v, S, *, scale="K ** foo"'), r"scale: got the default 'K \*\* foo' in mine .*NameError"),
    "default syntax": (page(SCALED, 'q, v, S, *, scale="K **"'), r"scale: got the default 'K \*\*' in mine .*SyntaxError"),
    "default inf": (page(SCALED, 'q, v, S, *, scale=float("inf")'), "scale: got the default inf in mine .*; accepted: a"),
    "default None": (page(SCALED, "q, v, S, *, scale=None"), "scale: got the default None in mine .*; accepted: "),
    "ascii": (page(parameters='q, v, \u00e9', dims='q="C K", v="C V", \u00e9=carried("K V")'), "got the name .*: ASCII"),
}


@pytest.mark.parametrize("what", BAD)
def test_a_bad_page_is_refused_before_anything_is_written(what, tmp_path, capsys):
    text, says = BAD[what]
    out = tmp_path / "out"
    assert main(["build", "--target", "triton", "--algorithm", file(tmp_path, text), "--out", str(out)]) == 2
    error = capsys.readouterr().err
    assert re.search(says, error) and error.startswith("gdn_codegen: ") and error.count("\n") == 1 and not out.exists()


@pytest.mark.parametrize("name", ["out", "out_o", "cu_seqlens", "initial_state", "final_state", "output_final_state", "HOST",
                                  "state_indices", "checkpoint_chunks", "_run", "torch"])
@pytest.mark.parametrize("number", [False, True])
def test_parameters_may_not_have_names_of_generated_functions(name, number):
    def fn(q, S, *, n=1.0):
        o = n * (q @ S)
        return o, S
    words = {"n": name} if number else {"q": name}
    code = fn.__code__.replace(co_varnames=tuple(words.get(v, v) for v in fn.__code__.co_varnames))
    fn.__code__, fn.__kwdefaults__ = code, {words.get("n", "n"): 1.0}
    with pytest.raises(ValueError, match=rf"^{name}: got a parameter of this name in fn .*; accepted: .*cu_seqlens"):
        algorithm(**{words.get("q", "q"): "C K", "S": carried("K V")})(fn).trace()


@pytest.mark.slow
@pytest.mark.parametrize("target", HERE)
def test_numbers_may_have_names_of_the_kernels_own_and_no_default(target, tmp_path):
    spec = file(tmp_path, page("o = n * (length * (q @ S)) + 0 * v\n    return o, S", "q, v, S, *, n, length=2.0"))
    b = Build(target, 16, algorithm=spec, schedule=Schedule("own", (("o", "S"),)), head_dim_k=16, head_dim_v=16)
    q, v, S = (torch.randn(1, 20, 1, 16).half() for _ in "qvS")
    S = torch.randn(1, 1, 16, 16)
    o, _ = function(b)(q, v, n=3.0, initial_state=S)
    assert rms_error(o[0, :, 0], 6 * (q[0, :, 0].double() @ S[0, 0].double())) < 1e-3
    with pytest.raises(ValueError, match="n: got None; accepted: a number"):
        function(b)(q, v, initial_state=S)
    case = Case((20,))
    x = inputs(b, b.page.trace(), case)
    assert rms_error(run(b, case, x)["o"], reference(b, case, x)["o"]) < 1e-3


TWO_GATES = """A = cumsum(a)
    B = cumsum(b)
    D = exp(lower(A[:, None] - A[None, :], fill=-inf)) * exp(lower(B[:, None] - B[None, :], fill=-inf))
    o = float * (exp(A + B)[:, None] * (x @ S) + ((x @ T.T) * D) @ tl)
    S = exp(last(A) + last(B)) * S + T.T @ (exp(last(A) - A + last(B) - B)[:, None] * tl)
    return o, S"""
RATES = """R = cumsum(a)
    D = exp(lower(R[None, :] - R[:, None], fill=-inf))
    o = exp(-R)[:, None] * (x @ S) + ((x @ T.T) * D) @ tl
    S = exp(-last(R)) * S + T.T @ (exp(R - last(R))[:, None] * tl)
    return o, S"""


@pytest.mark.slow
@pytest.mark.parametrize("target", HERE)
def test_two_gates_side_by_side_and_names_of_the_targets(target, tmp_path):
    """Either gate may forget all."""
    text = "from math import inf\n" + page(TWO_GATES, "x, T, tl, a, b, S, *, float=1.0",
                                          'x="C K", T="C K", tl="C V", a="C", b="C", S=carried("K V")')
    b = Build(target, 32, algorithm=file(tmp_path, text), schedule=Schedule("own", (("o", "S"),)), head_dim_k=16, head_dim_v=16)
    case = Case((70, 0, 33))
    x = inputs(b, b.page.trace(), case)
    want, got = reference(b, case, x), run(b, case, x)
    assert max(rms_error(got[n], want[n]) for n in want) < 1e-3
    strong = {**x, "a": x["a"].clone(), "b": x["b"].clone()}
    strong["a"][[5, 33]], strong["b"][[33, 60]] = -300, -300
    want, strong["a"][5] = reference(b, case, strong), -inf
    got = run(b, case, strong)
    assert max(rms_error(got[n], want[n]) for n in want) < 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("target", HERE)
def test_a_rate_that_is_subtracted_forgets_all(target, tmp_path):
    text = "from math import inf\n" + page(RATES, "x, T, tl, a, S", 'x="C K", T="C K", tl="C V", a="C", S=carried("K V")')
    b = Build(target, 32, algorithm=file(tmp_path, text), schedule=Schedule("own", (("o", "S"),)), head_dim_k=16, head_dim_v=16)
    case = Case((40,))
    x = inputs(b, b.page.trace(), case)
    x["a"][[7, 20]] = 300
    want, x["a"][7] = reference(b, case, x), inf
    got = run(b, case, x)
    assert max(rms_error(got[n], want[n]) for n in want) < 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("target", HERE)
def test_a_page_without_state(target, tmp_path):
    spec = file(tmp_path, page("o = lower(q @ k.T) @ v\n    return o", "q, k, v", 'q="C K", k="C K", v="C V"'))
    b = Build(target, 16, algorithm=spec, schedule=Schedule("own", (("o",),)), head_dim_k=16, head_dim_v=16)
    case = Case((40, 0, 16))
    x = inputs(b, b.page.trace(), case)
    assert rms_error(run(b, case, x)["o"], reference(b, case, x, 16)["o"]) < 1e-3


CHOICES = {"a number": ("if mode == 1:\n        q = q * 2", "got mode == 1"),
           "data": ("if g > 0:\n        q = q * 2", "got g > 0"),
           "inequality": ("if g != k:\n        q = q * 2", "got g != k"), "truth": ("q = q and k", "got q as a truth value"),
           "order": ("q = max(q, k)", "got k > q"), "membership": ("q = k if g in (k, q) else q", "got k == g"),
           "an index": ("q = q[g]", r"got q\[g\]; accepted: x\[:, None\]")}


@pytest.mark.parametrize("what", CHOICES)
def test_a_page_cannot_branch_on_values(what, tmp_path, capsys):
    body, says = CHOICES[what]
    spec = file(tmp_path, page(f"{body}\n    o = q @ S\n    return o, S + k.T @ v", "q, k, v, g, S, *, mode=1.0",
                               'q="C K", k="C K", v="C V", g="C", S=carried("K V")'))
    assert main(["build", "--target", "triton", "--algorithm", spec, "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert re.search(rf"mine \(mine\.py, line \d+\): {says}", error) and error.count("\n") == 1
    assert what == "an index" or "cannot compare or branch on data or on a caller's number; accepted:" in error


@pytest.mark.parametrize("accept", ["nope=sigmoid", "nope=l2norm"])
def test_verify_refuses_forms_that_a_page_has_no_input_for(accept, tmp_path, capsys):
    assert main(["verify", "--target", HERE[0], "--quick", "--algorithm", file(tmp_path, page()), "--accept", accept]) == 2
    assert re.match(r"gdn_codegen: inputs: got .?nope", capsys.readouterr().err)


def test_outputs_that_no_group_names_are_said(tmp_path, capsys):
    spec = file(tmp_path, page("y = q @ S + v\n    return y, S"))
    words = ["build", "--target", "triton", "--algorithm", spec, "--out", str(tmp_path / "out")]
    assert main(words) == 0
    assert main([*words, "--set", "kernels=S"]) == 2
    assert "no group of kernels writes y" in (said := capsys.readouterr().err) and "--set kernels=y,S" in said
    assert "--set kernels=@output,@state" in said
    assert main([*words, "--set", "kernels=@gatesum,y/S"]) == 2
    assert "kernels has @gatesum, which is no role; accepted are @output" in capsys.readouterr().err


# --- what `verify` draws ----------------------------------------------------------------------------------------------
DECAYS = {
    "named": ("G = cumsum(a)\n    return exp(G)[:, None] * (q @ S) + b[:, None] * v, exp(last(G)) * S", {"a"}),
    "scaled and floored": ("G = cumsum(maximum(-5, 0.5 * a))\n    return exp(G)[:, None] * (q @ S), exp(last(G)) * S", {"a"}),
    "positive": ("G = cumsum(a)\n    return exp(-G)[:, None] * (q @ S), exp(-1 * last(G)) * S", set()),
    "positive, a difference": ("G = cumsum(a)\n    return exp(G - last(G))[:, None] * (q @ S), exp(0 - last(G)) * S", set()),
    "no sum": ("return exp(a)[:, None] * (q @ S), S", set()),
    "two": ("G = cumsum(a + b)\n    return exp(G)[:, None] * (q @ S), exp(last(G)) * S", {"a", "b"}),
    "raw": ("G = cumsum(valid(-exp(a)))\n    return exp(G)[:, None] * (q @ S), exp(last(G)) * S", set()),
}


@pytest.mark.parametrize("what", DECAYS)
def test_log_decays_are_known_by_what_the_page_does_with_them(what, tmp_path):
    body, want = DECAYS[what]
    dims = 'q="C K", v="C V", a="C", b="C", S=carried("K V")'
    reads_all = body.replace("(q @ S)", "(q @ S) + (a + b)[:, None] * v")
    b = Build("triton", algorithm=file(tmp_path, page(reads_all, "q, v, a, b, S", dims)))
    x = inputs(b, b.page.trace(), Case((20,)))
    assert {n for n in "ab" if (x[n] <= 0).all()} == want and {n for n in "ab" if (x[n] >= 0).all()} == {"a", "b"} - want


def test_an_input_that_says_what_is_forgotten_is_a_log_decay(tmp_path):
    text = page("o = q @ S + a[:, None] * v\n    return o, S", "q, v, a, b, S",
                'q="C K", v="C V", a="C", b="C", S=carried("K V", forgets="b")')
    assert log_decays(algorithms.find(file(tmp_path, text)).trace()) == {"b"}


def test_verify_of_a_page_without_value_heads_and_of_any_gates_name(tmp_path, capsys):
    text = page("G = cumsum(log_decay)\n    return exp(G)[:, None] * (q @ S), exp(last(G)) * S", "q, log_decay, S",
                'q="C K", log_decay="H C", S=carried("K V")')
    decays = inputs(b := Build("triton", algorithm=file(tmp_path, text)), b.page.trace(), Case((20,)))["log_decay"]
    assert (decays <= 0).all() and len(decays.unique()) > 2
    words = ["--target", HERE[0], "--quick", "--set", "kernels=exp_G_q_S/S", "--head-dim-k", "16", "--head-dim-v", "16"]
    assert main(["verify", "--algorithm", file(tmp_path, text), *words]) == 0, capsys.readouterr()


# --- what a module says that made it ---------------------------------------------------------------------------------
def made_by(b):
    return re.search(r"^Made by: (.*)", render(b), re.M)[1]


@pytest.mark.parametrize("target", OWN)
def test_the_command_in_a_module_of_a_page_of_ones_own_rebuilds_it(target, tmp_path, monkeypatch):
    file(tmp_path, page())
    monkeypatch.chdir(tmp_path)
    words = ["--target", target, "--chunk", "16", "--algorithm", f"{tmp_path}/mine.py:mine", "--set", "kernels=S/o"]
    assert main(["build", *words, "--out", "a"]) == 0
    (path,) = tmp_path.rglob("a/*/*.py")
    made = re.search(r"^Made by: gdn_codegen (.*)", path.read_text(), re.M)[1]
    assert "--algorithm mine.py:mine" in made and str(tmp_path) not in path.read_text()
    assert main([*made.split(), "--out", "b"]) == 0
    assert (tmp_path / "b" / target / path.name).read_bytes() == path.read_bytes()


@pytest.mark.parametrize("target", OWN)
def test_a_module_of_a_schedule_of_ones_own_says_which(target, tmp_path, monkeypatch):
    file(tmp_path, page())
    monkeypatch.chdir(tmp_path)
    plan = Schedule("own", (("S",), ("o",)), inverse="doubling", v_block=16, cache_masks=False)
    b = Build(target, 16, algorithm=f"{tmp_path}/mine.py:mine", schedule=plan, head_dim_k=32, contract=Contract.parse("state=vk"))
    text, of = made_by(b).split(" of ")
    again = eval(text, {"Build": Build, "Schedule": Schedule, "Contract": Contract, "render": lambda b: b})
    assert of == "gdn_codegen.runtime.build" and again == replace(b, algorithm="mine.py:mine") and render(again) == render(b)


@pytest.mark.parametrize("name", ['a"""b', "a\\", "caf\u00e9", "a b"])
def test_names_of_files_do_no_harm_to_a_module(name, tmp_path):
    spec = file(tmp_path, page(), name).removesuffix(name) + "mine"
    b = Build("triton", 16, algorithm=spec, schedule="fused")
    compile(render(b), "module", "exec")
    assert "_" in made_by(b) and str(tmp_path) not in render(b)


@pytest.mark.slow
@pytest.mark.parametrize("target", HERE)
def test_words_of_a_page_do_no_harm_to_a_module(target, tmp_path):
    text = page("o = (q @ S) * 2.0 + \\\n        v\n    return o, S").replace("A page.", 'Has \\"\\"\\" and \\\\x.')
    b = Build(target, 16, algorithm=file(tmp_path, text), schedule=Schedule("own", (("o", "S"),)), head_dim_k=16, head_dim_v=16)
    assert "Has \" and /x." in render(b)
    x = inputs(b, b.page.trace(), case := Case((20,)))
    assert rms_error(run(b, case, x)["o"], reference(b, case, x)["o"]) < 1e-3


@pytest.mark.parametrize("body", ["o = v + q @ S * len('\u00e9')\n    return o, S",
                                  "\u00e9 = q @ S\n    o = \u00e9 + v\n    return o, S"])
def test_other_characters_than_ascii_are_refused(body, tmp_path):
    with pytest.raises(ValueError, match=r"algorithm: got '.xe9' in a line of mine .*; accepted: ASCII"):
        render(Build("triton", algorithm=file(tmp_path, page(body)), schedule=Schedule("own", (("S",), ("o",)))))


@pytest.mark.parametrize("name", [*algorithms.names(), "gdn"])
def test_a_page_that_is_called_like_one_of_the_package_is_to_be_renamed(name, tmp_path):
    with pytest.raises(ValueError, match=rf"algorithm: got .*{name}.*; accepted: .*rename it"):
        render(Build("triton", algorithm=file(tmp_path, page(name=name), name)))


@pytest.mark.slow
@pytest.mark.parametrize("target", HERE)
def test_inputs_may_have_any_name_where_gradients_are_enabled(target, tmp_path):
    """The function that callers see has variables of its own."""
    algorithm_of = file(tmp_path, page("S = S + k.T @ x\n    o = q @ S + name\n    return o, S", "q, k, x, name, S",
                                       'q="C K", k="C K", x="C V", name="C V", S=carried("K V")'))
    plan = Schedule("own", (("o", "S"),))
    fn = function(Build(target, 16, algorithm=algorithm_of, head_dim_k=32, head_dim_v=32, schedule=plan))
    q, k, x, name = torch.randn(4, 1, 10, 1, 32).half()
    with torch.enable_grad():
        o, _ = fn(q, k, x, name)
    want = q[0, :, 0].double() @ (k[0, :, 0].double().T @ x[0, :, 0].double()) + name[0, :, 0]
    assert rms_error(o[0, :, 0], want) < 5e-3
