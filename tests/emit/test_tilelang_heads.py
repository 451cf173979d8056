"""TileLang: kernels whose blocks run several value heads, on CPU tensors, and compiled for sm_90a."""
import re
import shutil
from dataclasses import replace

import pytest
import torch
from reference import TOLERANCE, check, expected, in_parts, module, passed, problem

from gdn_codegen.runtime.build import Build, render
from gdn_codegen.runtime.load import function
from gdn_codegen.schedule import SCHEDULES, named
from gdn_codegen.schedule.contract import Contract
from gdn_codegen.tools import check_tilelang

pytest.importorskip("tilelang")
RAGGED = [33, 0, 64, 1, 0, 70]
HEADS = [1, 3, 16, 17, 20]
RAW = "beta=sigmoid/float16,dt_bias=bfloat16,g=raw/float16"
UNIT = replace(named("fused_walk", "sm_90a"), partition="decay")


def build(layout="bthd", schedule="fused_walk", accept="", **options):
    options = {"head_dim_k": 32, "head_dim_v": 32, **options}
    return Build("tilelang", 32, layout, schedule=schedule, contract=Contract.parse(accept), **options)


@pytest.mark.slow
@pytest.mark.parametrize("layout, schedule", [("bthd", "fused_walk"), ("bhtd", "staged")])
def test_any_number_of_heads(layout, schedule):
    fn = function(build(layout, schedule))
    for n, HV in enumerate(HEADS):
        check(fn, problem(RAGGED, 1, HV, 32, 32, seed=n), layout=layout)
    check(fn, problem([45, 45], 1, 5, 32, 32), batched=True, layout=layout)


@pytest.mark.slow
def test_forms_dtypes_and_numbers_of_a_head(layout="bhtd"):
    fn, c = function(build(layout, accept=RAW)), Contract.parse(RAW)
    for HV in HEADS:
        x, read = passed(RAGGED, 1, HV, 32, 32, dict(c.inputs), {n: getattr(torch, d) for n, d in c.dtypes}, seed=HV)
        check(fn, x, TOLERANCE["float16"], read, layout=layout)


@pytest.mark.slow
def test_strided_views():
    """g and beta beside each other, every other token another tensor's."""
    fn = function(build(accept="strided"))
    for HV in (3, 17):
        x = problem(RAGGED, 1, HV, 32, 32)
        both = torch.full((len(x["g"]), 2, 2, HV), float("nan"))
        both[:, 0, 0], both[:, 0, 1] = x["g"], x["beta"]
        args = [x[n][None] for n in "qkv"] + [both[None, :, 0, 0], both[None, :, 0, 1]]
        ends = torch.tensor([0, *torch.tensor(RAGGED).cumsum(0).tolist()], dtype=torch.int32)
        o, S = fn(*args, scale=x["scale"], initial_state=x["S"], output_final_state=True, cu_seqlens=ends)
        want_o, want_S = expected(x)
        assert (o[0] - want_o).abs().max() < 5e-3 and (S - want_S).abs().max() < 5e-3


@pytest.mark.slow
def test_a_number_of_each_chunk_and_head():
    """What a chunk forgets, by which walks of parts begin early."""
    fn = in_parts(function(build(schedule=UNIT, accept="k=unit")), 1)
    for HV in HEADS:
        x = problem([97, 0, 33], 1, HV, 32, 32)
        for h, g in enumerate((-3.0, -0.6, 0.0)):
            x["g"][:, h::3] = g
        check(fn, x)


#: In the text of G_beta, or of what sums its rows.
MUTATIONS = {
    "each block has the first heads": (r"hv = block \* 16", "hv = 0"),
    "rows past the end keep what lies there": (r"T\.if_then_else\(i < rows, (.*), 0\)$", r"\1"),
    "sums begin anew": (r"total = total \+ bounded", "total = bounded"),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", MUTATIONS)
def test_mutations_fail_the_comparison(what):
    b = build()
    text, n = re.subn(*MUTATIONS[what], render(b), flags=re.M)
    assert n
    with pytest.raises(AssertionError):
        check(getattr(module(text), b.function), problem([33, 64, 31, 96], 1, 17, 32, 32, gate=-0.1))


def past_the_end(text):
    """Of what G_beta stores of two chunks and three heads: whether it is right, and whether memory behind stays as it was."""
    m, x = module(text), problem([40], 1, 3, 32, 32)
    memory = torch.full((2, 960), float("nan"))
    G, beta = (w[:2 * 3 * 32].view(2, 3, 32) for w in memory)
    m._launcher.run_on_cpu("G_beta", [x["g"][None], x["beta"][None], G, beta],
                     (torch.tensor([0, 40], dtype=torch.int32), 1))
    g, b = (torch.cat([x[n], torch.zeros(24, 3)]).view(2, 32, 3).transpose(1, 2) for n in ("g", "beta"))
    return torch.allclose(G, g.cumsum(-1)) and torch.equal(beta, b), bool(memory[:, 2 * 3 * 32:].isnan().all())


@pytest.mark.slow
def test_heads_past_the_last_are_not_stored():
    text = render(build())
    assert past_the_end(text) == (True, True)
    assert past_the_end(text.replace("if hv + j < HV:", "if hv + j < HV + 9:"))[1] is False


def test_no_head_past_the_last_is_read():
    """Each load, number of a head and store asks whether there is one."""
    text = render(build(accept=RAW))
    body = text[text.index("with t.kernel(slots * T.ceildiv(HV"):text.index("return G_beta_kernel")]
    assert body.count("hv + j < HV") == len(re.findall(r"\[[^]]*\bhv\b", body)) == 6


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc of a CUDA toolkit")
@pytest.mark.parametrize("accept, schedule, kernel", [
    ("beta=sigmoid/bfloat16,g=raw/bfloat16,strided", "fused_walk", "G_beta"),
    pytest.param("k=unit", UNIT, "G_beta_F_chunk", marks=pytest.mark.long)])
def test_compiles_for_hopper(accept, schedule, kernel, tmp_path):
    """Four blocks of 256 threads share a multiprocessor."""
    b = Build("tilelang", schedule=schedule, arch="sm_90a", contract=Contract.parse(accept))
    (tmp_path / f"{b.name}.py").write_text(render(b))
    (found,) = check_tilelang.compiled(tmp_path / f"{b.name}.py", [kernel])
    assert not found.error and not found.spills and 0 < found.registers <= 64
    assert 4 * found.shared <= 227 * 1024


@pytest.mark.slow
def test_only_modules_with_such_kernels_carry_their_text():
    assert all(("row_cumsum" in render(build(schedule=name))) == (name in ("staged", "fused_walk")) for name in SCHEDULES)
