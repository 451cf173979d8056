"""`build`, `show` and `verify` for gradients."""
from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tiers import every

from gdn_codegen import derived_pages
from gdn_codegen.algorithms import names
from gdn_codegen.cli import main
from gdn_codegen.ir.ops import OPS
from gdn_codegen.runtime.build import Build
from gdn_codegen.schedule.contract import Contract
from gdn_codegen.tools.cases import Case
from gdn_codegen.tools.verify import lines

SMALL = ["--target", "triton", "--chunk", "16", "--head-dim-k", "16", "--head-dim-v", "16"]

#: A recurrence of one's own, of Lightning Attention.
OWN = '''
import torch
def recurrence(q, k, v, g, S, scale):
    o = []
    for t in range(len(q)):
        S = torch.exp(g) * S + torch.outer(k[t], v[t])
        o.append({scale} * q[t] @ S)
    return torch.stack(o), S
'''


def test_build_writes_the_two_modules_of_a_backward(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["build", *SMALL, "--schedule", "fused", "--algorithm", "gla", "--backward", "--out", str(tmp_path)]) == 0
    found = sorted(p.name for p in (tmp_path / "triton").iterdir())
    assert found == ["gla_gradient_c16_bthd_k16v16.py", "gla_states_c16_bthd_k16v16.py"]
    text = (tmp_path / "triton" / found[0]).read_text()
    assert "--algorithm gla.gradient " in text  # and that command builds it again
    assert main(["build", *SMALL, "--schedule", "fused", "--algorithm", "gla.gradient", "--out", str(tmp_path / "again")]) == 0
    assert (tmp_path / "again" / "triton" / found[0]).read_text() == text


def test_show_takes_derived_pages(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", *SMALL, "--schedule", "fused", "--algorithm", "simple_gla.gradient", "--ir"]) == 0
    assert "with loop('chunk', -1, d_S=" in capsys.readouterr().out


@pytest.mark.parametrize("words, said", [
    (["verify", "--algorithm", "gla.gradient"], "algorithm: got 'gla.gradient'; accepted: --algorithm gla, with --backward"),
    (["build", "--algorithm", "gla.states", "--backward"], "backward: got --backward with --algorithm gla.states"),
    (["verify", "--backward", "--report", "x"], "report: got --report with --backward"),
    (["show", "--algorithm", "gla.other"], "algorithm: got 'gla.other'")], ids=" ".join)
def test_what_is_refused(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([words[0], *SMALL, *words[1:]]) == 2
    assert said in capsys.readouterr().err


def verified(name: str, case: Case, accept: str = "", **options: object) -> tuple[str, bool]:
    """The line of `verify --backward`, and whether it holds."""
    b = Build("triton", 16, algorithm=f"{name}.gradient", head_dim_k=16, head_dim_v=32, contract=Contract.parse(accept),
              **options)  # type: ignore[arg-type]
    (found,) = lines([b], [case], backward=True)
    return found


@pytest.mark.slow
def test_verify_compares_each_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a rule with a wrong sign is seen."""
    case = Case((5, 0, 18))
    line, ok = verified("simple_gla", case, dtype="float32")
    assert ok and all(f"d_{n} " in line for n in ("q", "k", "v", "g", "initial_state"))
    vjp = OPS["exp"].vjp
    assert vjp is not None
    monkeypatch.setitem(OPS, "exp", replace(OPS["exp"], vjp=lambda r, o, ct: vjp(r, o, r.op("neg", ct))))
    derived_pages.derived.cache_clear()
    try:
        assert not verified("simple_gla", case, dtype="float32", layout="bhtd")[1]
    finally:
        derived_pages.derived.cache_clear()


@pytest.mark.slow
@pytest.mark.parametrize("gate", [None, *(pytest.param(g, marks=pytest.mark.long) for g in (-50.0, 0.0))], ids=str)
@pytest.mark.parametrize("name", names())
def test_verify_of_each_page(name: str, gate: float | None) -> None:
    """Gates of which all, some and none forget."""
    line, ok = verified(name, Case((19, 0, 33), gate=gate), dtype="float32")
    assert ok, line


@pytest.mark.slow
@pytest.mark.parametrize("name, accept, case", every(2, [
    ("gated_delta_rule", "beta=sigmoid,g=raw,k=l2norm,q=l2norm,state=vk"),
    ("gated_delta_rule", "beta=twice_sigmoid/bfloat16,g=linear/float16,k=unit,strided"), ("gated_delta_rule", "g=safe"),
    ("gated_delta_rule", "g=floored"), ("kimi_delta_attention", "beta=sigmoid,g=raw,k=l2norm,q=l2norm"),
    ("kimi_delta_attention", "g=bounded/float16"), ("mamba2", "dt=softplus"), ("mamba2", "dt=rectified"),
    ("delta_rule", "k=l2norm"), ("rwkv7", "w=raw")],
    [Case((17, 16, 15), 2, 4), Case((20, 20), gate=None, batched=True, initial=False)]),
    ids=lambda x: ("packed", "batched")[x.batched] if isinstance(x, Case) else x)
def test_verify_of_callers_forms(name: str, accept: str, case: Case) -> None:
    """The gradient is that of what callers pass."""
    line, ok = verified(name, case, accept, layout="bhtd", dtype="float32")
    assert ok, line


@pytest.mark.slow
@pytest.mark.parametrize("scale, status", [("scale", 0), ("2 * scale", 1)])
def test_a_recurrence_of_ones_own_is_differentiated(scale: str, status: int, tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text(OWN.replace("{scale}", scale))
    assert main(["verify", *SMALL, "--algorithm", "lightning_attention", "--backward", "--quick", "--schedule", "fused",
                 "--reference", f"{file}:recurrence"]) == status
