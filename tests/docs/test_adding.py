"""docs/adding_a_target.md and docs/adding_an_op.md, followed word for word outside of the package's folder."""
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
DOCS = {n: (ROOT / "docs" / f"adding_{n}.md").read_text() for n in ("a_target", "an_op")}
RUN = "import sys; from gdn_codegen.cli import main; sys.exit(main(sys.argv[1:]))"


def files(text):
    """What stands below each line "File `PATH`:", by path."""
    return dict(re.findall(r"^File `([^`]+)`:\n```\w+\n(.*?)^```$", text, re.M | re.S))


def blocks(text, kind):
    """Blocks of a kind that are no file."""
    alone = re.sub(r"^File `[^`]+`:\n```\w+\n.*?^```$", "", text, flags=re.M | re.S)
    return re.findall(rf"^```{kind}\n(.*?)^```$", alone, re.M | re.S)


def installed(folder, project):
    """The package of a pyproject.toml, as an installer leaves it: metadata beside it."""
    tomllib = pytest.importorskip("tomllib")
    about = tomllib.loads(project)["project"]
    info = folder / f"{about['name']}-{about['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {about['name']}\nVersion: {about['version']}\n")
    groups = (f"[{group}]\n" + "".join(f"{n} = {value}\n" for n, value in points.items())
              for group, points in about["entry-points"].items())
    (info / "entry_points.txt").write_text("\n".join(groups))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The files of both documents, with the target installed."""
    where = tmp_path_factory.mktemp("outside")
    for path, text in {**files(DOCS["a_target"]), **files(DOCS["an_op"])}.items():
        (where / path).parent.mkdir(exist_ok=True)
        (where / path).write_text(text)
    installed(where, (where / "pyproject.toml").read_text())
    return where


def python(folder, *words):
    env = {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}", "GDN_CODEGEN_CACHE": str(folder / "cache")}
    return subprocess.run([sys.executable, *words], cwd=folder, env=env, capture_output=True, text=True, timeout=500)


def commands(name):
    lines = [x.split() for block in blocks(DOCS[name], "sh") for x in block.splitlines()]
    assert lines and all(x[0] == "gdn_codegen" for x in lines)
    return lines


def test_the_documents_have_what_they_say():
    assert set(files(DOCS["a_target"])) == {"plain_torch/__init__.py", "plain_torch/emitter.py", "plain_torch/module.py.j2",
                                           "pyproject.toml"}
    assert set(files(DOCS["an_op"])) == {"my_ops.py", "my_rules.py", "my_torch_rules.py", "my_page.py"}


@pytest.mark.parametrize("words", [*commands("a_target"), *commands("an_op")], ids=lambda w: " ".join(w[1:6]))
def test_each_command_works(words, folder):
    done = python(folder, "-c", RUN, *words[1:])
    assert done.returncode == 0, done.stdout + done.stderr
    if words[1] == "doctor":
        assert re.search(r"^plain_torch CPU tensors +yes +plain PyTorch$", done.stdout, re.M), done.stdout
    elif words[1] == "build":
        assert "nothing to compile" in done.stdout
        (path,) = folder.glob("generated/plain_torch/*.py")
        assert "import gdn_codegen" not in path.read_text() and "def o_S_kernel(at, q," in path.read_text()
    elif words[1] == "verify":
        assert done.stdout.endswith("all comparisons hold\n") and words[words.index("--target") + 1] in done.stdout


def test_the_call_of_the_document_is_right(folder):
    """The op's o and state, against the recurrence in float64."""
    register, call = blocks(DOCS["a_target"], "python")
    check = f"""
import sys
sys.path.insert(0, {str(ROOT / 'tests')!r})
from reference import expected, rms_error
x = dict(lengths=[40], q=q[0], k=k[0], v=v[0], g=g[0], beta=beta[0], S=None, scale=32 ** -0.5)
want, states = expected(x)
wrong = rms_error(o[0], want), rms_error(state, states)
assert max(wrong) < 1e-5, wrong
"""
    done = python(folder, "-c", f"{register}\n{call}\n{check}print('right')")
    assert (done.returncode, done.stdout) == (0, "right\n"), done.stdout + done.stderr


def test_the_call_of_the_document_has_gradients(folder):
    """Through the op, against torch.autograd through the recurrence in float64."""
    register, call = blocks(DOCS["a_target"], "python")
    names = "q", "k", "v", "g", "beta"
    exact = ("    S = torch.zeros(4, 32, 32, dtype=torch.float64)\n    rows = []\n    for t in range(40):\n"
             "        a, b = (y[0, t].repeat_interleave(2, 0) for y in (q, k))\n"
             "        S = g[0, t].exp()[:, None, None] * S\n"
             "        u = beta[0, t][:, None] * (v[0, t] - (b[:, None] @ S)[:, 0])\n"
             "        S = S + b[:, :, None] * u[:, None]\n        rows.append(32 ** -0.5 * (a[:, None] @ S)[:, 0])\n"
             "    return torch.stack(rows)[None], S[None]\n")
    check = f"""
leaves = [y.detach().clone().requires_grad_() for y in ({", ".join(names)})]
o, state = chunk_gated_delta_rule(*leaves, target="plain_torch", chunk_size=16, output_final_state=True)
got = torch.autograd.grad(o.square().sum() + state.sum(), leaves)
def exact({", ".join(names)}):
{exact}
wide = [y.detach().double().requires_grad_() for y in leaves]
o, state = exact(*wide)
want = torch.autograd.grad(o.square().sum() + state.sum(), wide)
wrong = [((x - y).norm() / y.norm()).item() for x, y in zip(got, want)]
assert max(wrong) < 1e-5, wrong
"""
    done = python(folder, "-c", f"{register}\n{call}\n{check}print('right')")
    assert (done.returncode, done.stdout) == (0, "right\n"), done.stdout + done.stderr


def test_the_gradient_is_traced_with_the_first_call(folder):
    """torch.compile cannot trace the search for installed targets."""
    _, call = blocks(DOCS["a_target"], "python")
    check = """
f = torch.compile(lambda *x: chunk_gated_delta_rule(*x, target="plain_torch", chunk_size=16)[0].square().sum(),
                  fullgraph=True, backend="aot_eager")
leaves = [y.detach().clone().requires_grad_() for y in (q, k, v, g, beta)]
got = torch.autograd.grad(f(*leaves), leaves)
want = torch.autograd.grad(chunk_gated_delta_rule(*leaves, target="plain_torch", chunk_size=16)[0].square().sum(), leaves)
assert all(map(torch.equal, got, want))
"""
    call = "\n".join(x for x in call.splitlines() if not x.startswith("o, state"))
    done = python(folder, "-c", f"{call}\n{check}print('right')")
    assert (done.returncode, done.stdout) == (0, "right\n"), done.stdout + done.stderr


def test_the_rule_for_running_sums(folder):
    """As the op says, with and without the row itself; gradients of the pages that the guide's emitter takes have no such sum."""
    check = """
import torch
from gdn_codegen.ir.core import Op
from plain_torch.emitter import rule
x = -torch.rand(5, 3) * 9
for attrs in ((), (("exclusive", True),), (("least", -4.0),), (("exclusive", True), ("least", -4.0))):
    o = Op("cumsum", "y", ("x",), attrs)
    got = eval(rule.of(o)(None, o, "x"))
    rows = x if o.attr("least") is None else x.clamp(min=-4.0)
    want = torch.stack([rows[:i if o.attr("exclusive") else i + 1].sum(0) for i in range(5)])
    assert (got - want).abs().max() < 1e-5, (attrs, got, want)
"""
    done = python(folder, "-c", f"{check}print('right')")
    assert (done.returncode, done.stdout) == (0, "right\n"), done.stdout + done.stderr


def test_a_target_without_plans_refuses_gradients(folder):
    register, call = blocks(DOCS["a_target"], "python")
    without = register.replace("plain_torch.TARGET", "dataclasses.replace(plain_torch.TARGET, gradients={}, name='bare')")
    assert without != register
    asked = call.replace('"plain_torch"', '"bare"').replace("rule(q,", "rule(q.requires_grad_(),")
    done = python(folder, "-c", f"import dataclasses\n{without}\n{asked}")
    accepted = "ValueError: target: got 'bare'; accepted: auto, triton, tilelang, pto, plain_torch, which have gradients"
    assert done.returncode == 1 and accepted in done.stderr, done.stderr


def test_ops_with_rules_of_their_own(folder):
    (script,) = blocks(DOCS["an_op"], "python")
    done = python(folder, "-c", script)
    assert done.returncode == 0, done.stdout + done.stderr
    wrong = script.replace("v[t].abs()", "v[t]")
    assert wrong != script and "AssertionError: o: RMSE over RMS" in python(folder, "-c", wrong).stderr


def test_a_target_without_a_rule_says_so(folder):
    done = python(folder, "-c", RUN, "show", "--algorithm", "my_page.py:sizes", "--target", "tilelang", "--schedule", "fused",
                  "--chunk", "16", "--source")
    assert done.returncode == 2 and "tilelang has no rule for absolute (a, line" in done.stderr
