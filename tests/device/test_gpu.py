"""Generated ops on a CUDA GPU. Run with: pytest -m device tests/device"""
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from calls import checked, drawn, elsewhere
from choices import choice_for
from devices import change
from reference import call, check, in_parts, problem

from gdn_codegen.ops import chunk_gated_delta_rule, recurrent_gated_delta_rule
from gdn_codegen.runtime.admit import LEFT
from gdn_codegen.runtime.build import Build
from gdn_codegen.runtime.call import tables
from gdn_codegen.runtime.load import function, write
from gdn_codegen.runtime.targets import runs
from gdn_codegen.schedule import SCHEDULES, Schedule, named, varied
from gdn_codegen.targets import OWN
from gdn_codegen.targets.candidates import Space
from gdn_codegen.tools import compile_ahead, tune
from gdn_codegen.tools.shapes import Shape
from gdn_codegen.tools.tune_meter import Gpu

pytestmark = [pytest.mark.device, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
HERE = [t for t in OWN if t != "pto" and runs(t, "cuda")]
#: float32 operands pass the matrix units of a GPU as tf32 under TileLang.
TOLERANCE = {("triton", "float32"): 1e-5, ("tilelang", "float32"): 3e-3}


def on_gpu(fn):
    def run(*tensors, initial_state, cu_seqlens, **options):
        move = lambda t: None if t is None else t.cuda()
        o, S = fn(*map(move, tensors), initial_state=move(initial_state), cu_seqlens=move(cu_seqlens), **options)
        return o.cpu(), S.cpu()
    return run


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("target", HERE)
def test_schedules(target, schedule, dtype):
    size = 128 if dtype != "float32" else 64
    b = Build(target, 64, "bthd", "gated_delta_rule", schedule, dtype, size, size)
    fn = on_gpu(function(b))
    limit = TOLERANCE.get((target, dtype), 5e-3)
    for lengths, H, HV in (([1], 1, 1), ([130, 0, 65], 1, 2), ([447], 2, 4), ([64, 64], 1, 1)):
        x = problem(lengths, H, HV, size, size, getattr(torch, dtype), gate=-0.1, seed=len(lengths))
        check(fn, x, limit)
    check(fn, problem([70, 70], 1, 2, size, size, getattr(torch, dtype), initial=False), limit, batched=True)


@pytest.mark.parametrize("chunk", [16, 32, 128])
@pytest.mark.parametrize("target", HERE)
def test_chunks_and_head_major_layout(target, chunk):
    fn = on_gpu(function(Build(target, chunk, "bhtd", "gated_delta_rule", "replay", "float16", 64, 64)))
    check(fn, problem([130, 0, 65], 1, 2, 64, 64), layout="bhtd")


@pytest.mark.parametrize("target", HERE)
def test_same_bits_every_time(target):
    fn = on_gpu(function(Build(target)))
    x = problem([333, 64], 2, 4, 128, 128, gate=-0.05)
    first = call(fn, x)
    for _ in range(20):
        again = call(fn, x)
        assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])


# --- warp groups -----------------------------------------------------------------------------------------------------
hopper = pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0) or
                            not runs("tilelang", "cuda"), reason="needs a Hopper GPU and TileLang")
#: What a schedule of warp groups may be: ring lengths, blocks of V, sizes of 64.
GROUPS = {"f16": Build("tilelang", schedule="walk", arch="sm_90a"),
          "f16-parts": Build("tilelang", schedule=replace(named("walk", "sm_90a"), partition="decay"), arch="sm_90a"),
          "f16-early": Build("tilelang", schedule=replace(named("walk", "sm_90a"), name="walkstate", partition="decay",
                                                       warm_up="state"), arch="sm_90a"),
          "bf16-bhtd": Build("tilelang", layout="bhtd", schedule="walk", dtype="bfloat16", arch="sm_90a"),
          "stages": Build("tilelang", schedule=replace(named("walk", "sm_90a"), name="walk3", stages=3), arch="sm_90a"),
          "columns": Build("tilelang", schedule=replace(named("walk", "sm_90a"), name="walk64", v_block=64), arch="sm_90a"),
          **{f"operands-{'-'.join(map(str, fields.values()))}": Build(
              "tilelang", layout=layout, dtype=dtype, arch="sm_90a",
              schedule=varied("operand_walk", "sm_90a", agents="early_outputs", **fields))
             for layout, dtype, fields in (("bthd", "float16", {}), ("bhtd", "bfloat16", {"v_block": 64}),
                                           ("bthd", "float16", {"v_block": 64, "partition": "decay"}))},
          "k64v64": Build("tilelang", schedule="walk", head_dim_k=64, head_dim_v=64, arch="sm_90a"),
          "fused": Build("tilelang", schedule="fused_walk", arch="sm_90a"),
          **{f"persistent-{n}-{size}": Build("tilelang", schedule=varied(n, "sm_90a", persistent=True), head_dim_k=size,
                                             head_dim_v=size, arch="sm_90a")
             for n, size in (("walk", 128), ("fused_walk", 128), ("fused_walk", 64))},
          "fused-parts": Build("tilelang", schedule=replace(named("fused_walk", "sm_90a"), partition="decay"), arch="sm_90a"),
          "fused-early": Build("tilelang", schedule=replace(named("fused_walk", "sm_90a"), name="fusedstate", partition="decay",
                                                            warm_up="state"), arch="sm_90a"),
          "fused-longest": Build("tilelang", schedule=varied("fused_walk", "sm_90a", partition="decay", longest_first=True),
                                 arch="sm_90a"),
          "fused-bf16-bhtd": Build("tilelang", layout="bhtd", schedule="fused_walk", dtype="bfloat16", arch="sm_90a"),
          "fused-k64v64": Build("tilelang", schedule="fused_walk", head_dim_k=64, head_dim_v=64, arch="sm_90a"),
          **{f"own-{form}": Build("tilelang", schedule=Schedule("own", (("G", "Tinv"), ("o", "S")), form=form, state_layout="vk"),
                                  arch="sm_90a") for form in ("split", "direct", "unit")}}


def for_groups(b, lengths, H=2, HV=4, **options):
    return problem(lengths, H, HV, b.head_dim_k, b.head_dim_v, getattr(torch, b.dtype), **options)


@hopper
@pytest.mark.parametrize("name", GROUPS)
def test_warp_groups(name):
    b = GROUPS[name]
    fn = on_gpu(function(b))
    for n, lengths in enumerate(([64], [1], [63], [65], [0], [128, 64], [1, 63, 65, 0, 130, 64], [447, 0, 0, 1])):
        check(fn, for_groups(b, lengths, gate=-0.1, initial=n % 2 == 0, seed=n), layout=b.layout)
    for H, HV in ((1, 1), (1, 3), (4, 4)):
        check(fn, for_groups(b, [70, 200], H, HV), layout=b.layout)
    for gate in (0.0, -50.0, "mixed"):
        check(fn, for_groups(b, [200], gate=gate), layout=b.layout)
    check(fn, for_groups(b, [70, 70, 70], initial=False), batched=True, layout=b.layout)
    check(fn, for_groups(b, [3, 3]), batched=True, layout=b.layout)


@hopper
@pytest.mark.parametrize("name", [n for n, b in GROUPS.items() if b.plan.persistent])
def test_a_block_that_takes_several_walks_gives_the_bits_of_several_blocks(name):
    """Blocks have ten walks each, with and without a ragged tail, and without tokens. Each run assigns them differently."""
    b = GROUPS[name]
    one, several = (on_gpu(function(replace(b, schedule=replace(b.plan, persistent=x)))) for x in (False, True))
    x = for_groups(b, [64, 0, 1, 130, 63, 0, 0, 200, 65, 128] * 34)
    want = call(one, x)
    for _ in range(5):
        assert all(torch.equal(*pair) for pair in zip(call(several, x)[:2], want[:2], strict=True))


@hopper
@pytest.mark.parametrize("name", [n for n, b in GROUPS.items() if b.plan.partition])
def test_warp_groups_in_parts(name):
    """Heads that forget at once, that begin early, and that never forget: where no summaries are made, and where some are. Keys
    of norm 1, and such that hold memory up, so that walks begin further back than gates say."""
    b = GROUPS[name]
    fn = on_gpu(in_parts(function(b), 1))
    for norm in (1.0, 1.5):
        for lengths in ([9 * 64], [9 * 64 + 1], [130, 0, 12 * 64 + 5, 1]):
            x = for_groups(b, lengths)
            x["k"] *= norm
            for h, gate in enumerate((-3.0, -0.05, -0.01, 0.0)):
                x["g"][:, h] = gate
            check(fn, x, layout=b.layout)
    in_parts(function(b), 0)


@hopper
@pytest.mark.parametrize("heads", [2, 4])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_value_heads_together(dtype, heads):
    plan = replace(named("walk", "sm_90a"), value_heads=heads, partition="decay")
    b = Build("tilelang", schedule=plan, dtype=dtype, arch="sm_90a")
    fn = on_gpu(function(b))
    for n, lengths in enumerate(([1], [65], [1, 63, 0, 130], [447, 64])):
        for H in (1, 3):
            check(fn, for_groups(b, lengths, H, H * heads, gate=-0.1, seed=n))
    x = for_groups(b, [1000, 64, 333], 2, 2 * heads, gate=-0.05)
    first = call(fn, x)
    for _ in range(20):
        again = call(fn, x)
        assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])


@hopper
@pytest.mark.parametrize("name", GROUPS)
def test_warp_groups_keep_sequences_apart(name):
    """NaN of a neighbour, before and after, never enters, and no row of a neighbour is written."""
    b = GROUPS[name]
    fn, lengths = on_gpu(function(b)), [40, 70, 33, 64, 1]
    x = for_groups(b, lengths)
    o, S = call(fn, x, layout=b.layout)
    for n in range(len(lengths)):
        first, end = sum(lengths[:n]), sum(lengths[:n + 1])
        bad = {**x, **{i: x[i].clone() for i in ("q", "k", "v")}}
        for i in ("q", "k", "v"):
            bad[i][first:end] = float("nan")
        o2, S2 = call(fn, bad, layout=b.layout)
        rows = [t for t in range(sum(lengths)) if not first <= t < end]
        rest = [m for m in range(len(lengths)) if m != n]
        assert torch.equal(o2[rows], o[rows]) and torch.equal(S2[rest], S[rest])
        assert o2[first:end].isnan().all() and S2[n].isnan().any()


@hopper
@pytest.mark.parametrize("name", ["f16", "fused"])
def test_warp_groups_give_the_same_bits_every_time(name):
    b = GROUPS[name]
    fn, x = on_gpu(function(b)), for_groups(b, [1000, 64, 333], gate=-0.05)
    first = call(fn, x)
    for _ in range(50):
        again = call(fn, x)
        assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])


@hopper
def test_the_default_on_hopper_has_warp_groups():
    x = for_groups(GROUPS["f16"], [70])
    given = x["q"][None].cuda(), x["v"][None].cuda(), "auto", 64
    assert choice_for(*given, sequences=1000).build.arch == choice_for(*given).build.arch == "sm_90a"
    check(on_gpu(chunk_gated_delta_rule), x)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("target", HERE)
def test_a_graph_holds_a_call(target, packed):
    """Captured after one call; replayed on other values, it gives what a call on them gives."""
    fn = function(Build(target, schedule="replay"))
    x = problem([70, 130] if packed else [200], 1, 2, 128, 128, initial=False)
    given = [x[n][None].cuda() for n in ("q", "k", "v", "g", "beta")]
    cu = torch.tensor([0, 70, 200], device="cuda") if packed else None
    run = lambda: fn(*given, output_final_state=True, cu_seqlens=cu)
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    for shift in (1, 2):
        for t in given:
            t.copy_(t.roll(shift, 1))
        want = run()
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(captured, want, strict=True))


@pytest.mark.parametrize("target", HERE)
def test_a_call_does_not_wait_for_the_gpu(target):
    fn = function(Build(target, schedule="replay"))
    x = problem([70, 130], 1, 2, 128, 128)
    given, state = [x[n][None].cuda() for n in ("q", "k", "v", "g", "beta")], x["S"].cuda()
    rows = [t.view(2, 100, *t.shape[2:]) for t in given]
    cu = torch.tensor([0, 70, 200], device="cuda")
    calls = [lambda: fn(*given, initial_state=state, output_final_state=True, cu_seqlens=cu), lambda: fn(*rows)]
    calls[0]()  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        for call_ in (*calls, *calls):
            call_()
    finally:
        torch.cuda.set_sync_debug_mode("default")


# --- ahead of calls --------------------------------------------------------------------------------------------------
@hopper
@pytest.mark.parametrize("arch", ["", "sm_90a"])
def test_the_first_call_compiles_nothing_where_kernels_were_compiled_ahead(arch, tmp_path, monkeypatch):
    import tilelang
    b = Build("tilelang", schedule="walk" if arch else "fused", arch=arch, head_dim_k=64, head_dim_v=64)
    path = write(b, tmp_path)
    assert list(compile_ahead.compile_ahead(b, path, "sm_90a", []))
    monkeypatch.setattr(tilelang, "compile", lambda *a, **k: pytest.fail("compiled"))
    check(on_gpu(getattr(compile_ahead.fresh(path), b.function)), problem([130, 0, 65], 1, 2, 64, 64))


def test_triton_finds_what_was_compiled_ahead(tmp_path, monkeypatch):
    triton = pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    b = Build("triton", head_dim_k=64, head_dim_v=64)
    path = write(b, tmp_path)
    arch = "sm_{}{}".format(*torch.cuda.get_device_capability())
    assert list(compile_ahead.compile_ahead(b, path, arch, [(1, 2)]))
    hits = []
    monkeypatch.setattr(triton.knobs.compilation, "listener", lambda **k: hits.append(k["cache_hit"]))
    check(on_gpu(getattr(compile_ahead.fresh(path), b.function)), problem([130, 0, 65], 1, 2, 64, 64))
    assert hits and all(hits)


@pytest.mark.parametrize("target", HERE)
def test_tune_measures_and_its_table_is_found(target, tmp_path, monkeypatch):
    """Two candidates at a small shape, numerics included."""
    change(monkeypatch, target, spaces=(Space(("replay", "fused"), {}, (64,)),))
    said, path = [], tmp_path / "table.json"
    assert tune.tune(Build(target), [Shape("small", (500, 300), 2, 4)], *tune.here(), Gpu(5), path, say=said.append) == 0
    assert not any("dropped" in line for line in said), said
    assert tables.read(path, tables.USER)[0].ms > 0


# --- the contract ----------------------------------------------------------------------------------------------------
#: Random calls on Triton whose kernels end a process's use of the GPU if ptxas 12.8 assembled them (docs/admission.md).
LOSES_THE_GPU = (54,)
DRAWN = [*(("triton", n) for n in range(60) if n not in LOSES_THE_GPU), *(("tilelang", n) for n in range(5))]


@pytest.mark.skipif("triton" not in HERE, reason="needs Triton")
@pytest.mark.parametrize("seed", LOSES_THE_GPU)
def test_kernels_that_are_assembled_wrong_are_refused(seed, tmp_path):
    """In processes of their own. The first says that it has lost the GPU, the next one refuses the build. With another ptxas both
    give right results."""
    text = ("from calls import checked, drawn, elsewhere\nfrom gdn_codegen.ops import chunk_gated_delta_rule\n"
            f"checked(drawn({seed}, 'triton'), elsewhere(chunk_gated_delta_rule, 'cuda'))")
    path = os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])
    env = {**os.environ, "GDN_CODEGEN_CACHE": str(tmp_path), "PYTHONPATH": path}
    first, second = (subprocess.run([sys.executable, "-c", text], env=env, capture_output=True, text=True) for _ in range(2))
    assert first.returncode == second.returncode
    assert not first.returncode or (LEFT in first.stderr and "Refused: " in second.stderr), first.stderr + second.stderr


@pytest.mark.parametrize("target, seed", DRAWN)
def test_random_calls(target, seed):
    """All that the contract allows at once; float32 products of TileLang pass as tf32."""
    c = drawn(seed, target)
    if target == "tilelang" and c.dtype == "float32":
        pytest.skip("products of float32 are off by 1e-3 there")
    try:
        checked(c, elsewhere(recurrent_gated_delta_rule if c.decode else chunk_gated_delta_rule, "cuda"))
    except (ValueError, RuntimeError) as e:
        if not re.search("bytes of shared memory, and an H100 has|miscompiles this module's kernels", str(e)):
            raise
        pytest.skip(str(e))  # chunks of 128 with much of K, or under a Triton that gets them wrong


def _raw_with_pool(seed):
    c = drawn(seed, "tilelang")
    plain = not c.decode and not c.views
    return c.gate == "raw" and c.l2norm and c.pool == "in place" and c.dtype == "bfloat16" and plain


@hopper
@pytest.mark.parametrize("seed", [n for n in range(4000) if _raw_with_pool(n)])
def test_what_engines_pass_on_hopper(seed):
    """Raw gates, norms in the kernel and a pool of bfloat16 states, V first, with the kernels of warp groups."""
    c = drawn(seed, "tilelang")
    c.K = c.V = 128
    c.chunk, c.schedule, c.v_first, c.state_dtype, c.checkpoints = 64, None, True, "bfloat16", 0
    checked(c, elsewhere(chunk_gated_delta_rule, "cuda"))
