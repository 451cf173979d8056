"""Grouped value heads on the PTO target: HV a multiple of H, in one build for all counts, or compiled in."""
import re
from dataclasses import replace

import pytest
import torch
from reference import TOLERANCE, call, check, module, problem
from tiers import every

from gdn_codegen import chunk_gated_delta_rule
from gdn_codegen.cli import main
from gdn_codegen.runtime import load
from gdn_codegen.runtime.build import Build, render
from gdn_codegen.runtime.call import launch
from gdn_codegen.runtime.load import function
from gdn_codegen.schedule import named
from gdn_codegen.targets import OWN
from gdn_codegen.tools.bench_pto import Problem, stages

#: HV, and an H that divides it.
COUNTS = {8: 8, 12: 4, 16: 1, 24: 8, 32: 16, 48: 2, 64: 4}


def small(compiled=None, schedule="fused", **options):
    return Build("pto", **{"chunk": 32, "head_dim_k": 32, "head_dim_v": 32} | options, schedule=schedule, heads=compiled)


@pytest.mark.slow
@pytest.mark.parametrize("chunk, schedule, dtype, size, value_heads", every(2, [
    (64, "fused", "float16", 64), (128, "staged", "bfloat16", 128)], COUNTS))
def test_value_heads(chunk, schedule, dtype, size, value_heads):
    fn = function(Build("pto", chunk, schedule=schedule, dtype=dtype, head_dim_k=size, head_dim_v=size))
    check(fn, problem([chunk + 6, 0, 9], 4, value_heads, size, size, getattr(torch, dtype), gate=-0.1, seed=value_heads))


@pytest.mark.slow
@pytest.mark.parametrize("schedule, dtype, layout, value_heads", [
    ((("fused", "float16", "bthd"), ("staged", "bfloat16", "bhtd"))[n % 2] + (count,)) for n, count in enumerate(COUNTS)])
def test_value_heads_compiled_in(schedule, dtype, layout, value_heads):
    """B, T and N stay dynamic: one build for packed sequences and for equal rows, with and without a state."""
    h = COUNTS[value_heads]
    fn = function(small((h, value_heads), schedule, dtype=dtype, layout=layout))
    x = lambda lengths, **options: problem(lengths, h, value_heads, 32, 32, getattr(torch, dtype), gate=-0.1, **options)
    check(fn, x([38, 0, 9], seed=value_heads), TOLERANCE[dtype], layout=layout)
    check(fn, x([33, 33], initial=False), TOLERANCE[dtype], layout=layout, batched=True)


@pytest.mark.slow
def test_one_launch_with_heads_compiled_in():
    fn = function(small((2, 6), replace(named("staged"), launch="single")))
    check(fn, problem([40, 0, 33], 2, 6, 32, 32))


def test_compiled_in_kernels_take_no_counts():
    text = render(small((2, 6), "staged"))
    kernels = text.split("PTO_ENTRY void ")[1:]
    assert len(kernels) == len(named("staged").kernels)
    assert all("constexpr int64_t HV = 6;" in k and not re.search(r"int64_t (H|HV)[,)]", k) for k in kernels)
    assert all(re.search(r"int64_t N,\s+int64_t T,\s+int64_t batched,\s+int64_t slots", k) for k in kernels)
    plain = render(small(None, "staged"))
    assert "constexpr int64_t H =" not in plain and plain.count("    int64_t HV,") == 2 * len(kernels)


@pytest.mark.slow
def test_names_tell_builds_apart():
    builds = [small(h) for h in (None, (2, 6), (1, 6), (2, 4))]
    symbols = [s for b in builds for s, *_ in module(render(b)).SYMBOLS.values()]
    assert len({b.name for b in builds}) == len(set(symbols)) == len(builds)


@pytest.mark.parametrize("argument, h, value_heads, said", [
    ("q", 1, 6, r"q: got shape \(1, 40, 1, 32\); accepted: H = 2 heads"),
    ("q", 6, 6, r"q: got shape .*; accepted: H = 2 heads"),
    ("v", 2, 4, r"v: got shape \(1, 40, 4, 32\); accepted: HV = 6 heads"),
    ("v", 2, 12, r"v: got shape .*; accepted: HV = 6 heads")])
def test_another_count_is_refused(argument, h, value_heads, said):
    with pytest.raises(ValueError, match=said):
        call(function(small((2, 6))), problem([40], h, value_heads, 32, 32))


@pytest.mark.parametrize("counts", [(4, 6), (3, 2), (0, 2), (2, 0)])
def test_counts_that_do_not_group_are_refused(counts):
    with pytest.raises(ValueError, match=f"heads: got H = {counts[0]}, HV = {counts[1]}; accepted: HV a multiple of H"):
        small(counts)


@pytest.mark.parametrize("target", [t for t in OWN if t != "pto"])
def test_other_targets_refuse_counts(target, tmp_path, capsys):
    assert main(["build", "--target", target, "--heads", "2/6", "--out", str(tmp_path)]) == 2
    assert f"heads: got 2/6; accepted: none, since {target}" in capsys.readouterr().err
    assert not list(tmp_path.rglob("*.py"))


@pytest.mark.slow
def test_command_line(tmp_path, capsys):
    """The module's own command makes it again."""
    small_words = ["--target", "pto", "--chunk", "32", "--head-dim-k", "32", "--head-dim-v", "32"]
    assert main(["build", *small_words, "--heads", "2/6", "--out", str(tmp_path)]) == 0
    (path,) = (tmp_path / "pto").iterdir()
    assert path.name == f"{small((2, 6)).name}.py" and "--heads 2/6" in path.read_text()
    for wrong in ("6", "2/", "a/b", "4/6"):
        assert main(["build", *small_words, "--heads", wrong, "--out", str(tmp_path)]) == 2
        assert "heads: got" in capsys.readouterr().err
    words = ["bench", *small_words, "--tokens", "64", "--blocks", "2", "--schedule", "fused"]
    assert main([*words, "--heads", "2/6"]) == 0
    compiled = capsys.readouterr().out
    assert main([*words, "--heads", "2", "--value-heads", "6"]) == 0
    assert capsys.readouterr().out == compiled
    assert main([*words, "--heads", "2/6", "--value-heads", "4"]) == 2


@pytest.mark.slow
def test_stages_keep_their_names():
    names = [[s.name for s in stages(small(c, "staged"), Problem(40, 2, 6, 2))] for c in (None, (2, 6))]
    assert names[0] == names[1] == ["G", "A", "Tinv", "U_weight_U_offset", "S_U", "o"]


@pytest.mark.slow
def test_the_op_compiles_the_counts_of_its_tensors_in(monkeypatch):
    """Once for each, whatever the lengths."""
    built = []
    launch.forget()
    made = load.module
    monkeypatch.setattr(launch, "module", lambda b: built.append(b) or made(b))
    small_op = lambda *a, **options: chunk_gated_delta_rule(*a, **options, target="pto", chunk_size=32)
    for h, value_heads, lengths in ((2, 4, [40]), (2, 4, [9, 33]), (1, 3, [40])):
        check(small_op, problem(lengths, h, value_heads, 32, 32))
    assert [b.heads for b in dict.fromkeys(built)] == [(2, 4), (1, 3)]
    assert function(built[0]) is not function(built[-1])
    by_head = lambda *a, **options: small_op(*a, **options, layout="bhtd")
    check(by_head, problem([40], 2, 4, 32, 32), layout="bhtd")
    assert built[-1].heads == (2, 4)
    with pytest.raises(ValueError, match=r"heads: got H = 2, HV = 3"):
        call(small_op, problem([4], 2, 3, 32, 32))
