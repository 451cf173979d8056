"""Admission: kernels that are wrong are refused before their first result is handed out, and each build is tried once."""
import json
import math
import re
import threading
import warnings
from dataclasses import replace

import pytest
import torch
from choices import a_call, choice_for
from reference import expected, module, problem, rms_error
from tiers import every

from gdn_codegen import chunk_gated_delta_rule
from gdn_codegen.emit.page import page_text
from gdn_codegen.host import check, check_problem
from gdn_codegen.host.tables import Tables
from gdn_codegen.ir.builder import algorithm, carried, cumsum, exp, last, log, lower, maximum, row_norm, row_sum, sigmoid
from gdn_codegen.ir.interpret import Problem, interpret
from gdn_codegen.runtime import admit, load
from gdn_codegen.runtime.build import Build, render
from gdn_codegen.runtime.call import choose, launch
from gdn_codegen.runtime.call.tables import Extent
from gdn_codegen.runtime.targets import runs
from gdn_codegen.schedule import changes, varied
from gdn_codegen.schedule.contract import Contract

SMALL = {"chunk": 16, "head_dim_k": 16, "head_dim_v": 16}
HERE = [t for t in ("triton", "tilelang", "pto") if runs(t, "cpu")]


def text(target, schedule="fused", contract="", partition=None, **options):
    heads = (2, 4) if target == "pto" else None
    return render(Build(target, schedule=varied(schedule, partition=partition) if partition else schedule, heads=heads,
                        contract=Contract.parse(contract), **SMALL | options))


# --- what is broken --------------------------------------------------------------------------------------------------
#: Of each: the target, options of the build, what is found in its text and what is put there.
BROKEN = {
    "a wait": ("pto", {}, r"wait_flag\(PIPE_MTE2, PIPE_MTE1, EVENT_ID\d\);(?=  // k_next)", ""),
    "a stride": ("tilelang", {"contract": "state=pool/in_place"},
                 r"= initial_state_in\[state_indices_n \* initial_state_stride",
                 "= initial_state_in[state_indices_n * (HV * K * V)"),
    "a slot": ("tilelang", {"contract": "state=pool/in_place"}, r"(    initial_state_in\[)state_indices_n", r"\1n"),
    "a mask": ("tilelang", {}, r"T\.if_then_else\(i < rows, (v_in\[b, row \+ i, hv, j\]), 0\)", r"\1"),
    "a tail": ("tilelang", {}, r"if i < rows:", "if i < rows + 1:"),
    "an index": ("triton", {}, r"row_next = start \+ t \+ C", "row_next = start + t"),
    "a wrong dot": ("triton", {}, r"q_S = tl\.dot\(q, S_f16\)", "q_S = tl.dot(k, S_f16)"),
    "a dropped scale": ("tilelang", {}, r"= scale \* o_sum\[i, j\]", "= o_sum[i, j]"),
    "a gate's sign": ("triton", {}, r"tl\.exp2\(\(last_G - G\)", "tl.exp2((G - last_G)"),
    "a head index": ("triton", {}, r"h = hv // \(HV // H\)", "h = hv % H"),
    "the inverse of keys that are alike": ("triton", {}, r"Tinv_below_16 = tl\.dot\(", "Tinv_below_16 = 0 * tl.dot("),
    "a channel's erase gate": ("triton", {"algorithm": "gated_delta_rule_2", "chunk": 64, "head_dim_v": 32},
                               r"erase = k_f32 \* (b_\.to\(tl\.float32\))", r"erase = k_f32 * tl.sum(\1, 1)[:, None] / K"),
    "the inverse of rows that are made smaller": ("triton", {"algorithm": "rwkv7", "chunk": 64, "head_dim_v": 32},
                                                  r"Tinv_below_64 = tl\.dot\(", "Tinv_below_64 = 0 * tl.dot("),
    "a summary": ("tilelang", {"schedule": "walk", "partition": "decay"},
                  r"(def S_factor_kernel(?:.|\n)*?)= chunk_decay \* S", r"\1= S"),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", BROKEN)
def test_what_is_broken_is_refused_and_the_right_text_is_not(what):
    target, options, find, put = BROKEN[what]
    if target not in HERE:
        pytest.skip(f"{target} does not run here")
    good = text(target, **options)
    bad, n = re.subn(find, put, good)
    assert n, "nothing to break"
    with pytest.raises(RuntimeError, match=r"gives wrong results on cpu: .* off by|pto_sim \["):
        module(bad).check("cpu")


@pytest.mark.slow
@pytest.mark.parametrize("options", [
    {"contract": "beta=sigmoid,g=raw/float16,k=l2norm,q=l2norm,state=vk/bfloat16/pool/in_place/checkpoints,strided"},
    {"contract": "beta=twice_sigmoid,g=linear,k=unit,state=pool/positions", "dtype": "bfloat16", "layout": "bhtd"}], ids=str)
@pytest.mark.parametrize("target", HERE)
def test_what_is_right_passes_with_room_to_spare(target, options):
    options = options | {"head_dim_k": 32, "head_dim_v": 32}
    found = module(text(target, **options)).check("cpu")
    beside = {n for n in found if n.startswith("memory beside")}
    assert {"o", "memory beside out"} <= set(found) and len(found) - len(beside) == 3
    assert all(0 < e < accepted / 2 for n, (e, accepted) in found.items() if n not in beside)


@pytest.mark.slow
@pytest.mark.parametrize("page, dtype", every(2, ["gated_delta_rule_2", "rwkv7"], ["float16", "bfloat16", "float32"]))
def test_pages_whose_rows_can_make_a_state_grow_are_right(page, dtype):
    """Of 16 channels b k.k of a repeated token may be far below 0, and a state then grows with each token of a chunk."""
    if "triton" not in HERE:
        pytest.skip("needs Triton")
    m, factors = module(text("triton", algorithm=page, chunk=64, head_dim_v=32, dtype=dtype)), []
    drawn = m.check.problem.drawn
    m.check.problem.drawn = lambda lengths, heads, factor, *fast: factors.append(factor) or drawn(lengths, heads, factor, *fast)
    found = m.check("cpu")
    assert factors[:2] == [1, 0.5] and all(0 < found[n][0] < found[n][1] / 2 for n in ("o", "final_state"))


@pytest.mark.slow
def test_parts_are_tried_and_left_as_they_were(monkeypatch):
    if "tilelang" not in HERE:
        pytest.skip("needs TileLang")
    m, launched = module(text("tilelang", "walk", partition="decay")), set()
    launcher = m.HOST.launcher
    monkeypatch.setattr(m.HOST, "launcher", lambda name, *a: launched.add(name) or launcher(name, *a))
    m.check("cpu")
    assert launched == set(m._launcher.kernels) and m.TABLES.summaries and m.HOST.part_chunks == 0 and not m.HOST.plans
    assert m.TABLES.check_chunks > m.TABLES.most + 1


def test_the_problem_has_what_faults_hide_in():
    tables = Tables("small", "f", 64, "bthd", "float16", check_chunks=4, initial=(("S", (8, 8)),), decays=("g",), outputs=(),
                    inputs=(("k", "H", (8,), "float16"), ("g", "HV", (), "float32")), kernels=(), ints={})
    small = check_problem.CheckProblem(tables, None, {}, {})
    lengths = small.lengths(True, (2, 8))
    assert {0, 1, 64} <= set(lengths) and len(lengths) == 5 and lengths[-1] % 64 and lengths[-1] > 4 * 64
    x = small.drawn(lengths, (2, 8))
    long = x["k"][-lengths[-1]:]
    alike = (long[1:] == long[:-1]).flatten(1).all(1)
    assert alike.sum() == 63 and alike[63] and bool((x["g"] <= 0).all())
    mean = x["g"].mean(0)
    assert mean[1] == 0 and mean[0] < -1 and -0.1 < mean[2] < 0


@pytest.mark.parametrize("heads", [1, 2, 3, 4])
def test_few_heads_forget_at_all_rates_too(heads):
    """In groups of sequences, of which each repeats a token in its last one. Where rates are those of all sequences, as A_log is,
    two problems have strong and weak ones: a strong one hides what comes from states, a weak one sums that overflow."""
    inputs = ("k", "H", (8,), "float16"), ("g", "HV", (), "float32"), ("beta", "HV", (), "float32")
    tables = Tables("small", "f", 64, "bthd", "float16", check_chunks=4, initial=(("S", (8, 8)),), decays=("g", "rate"),
                    outputs=(), inputs=inputs, kernels=(), ints={}, head_inputs=(("rate", "HV", (), "float32"),))
    small = check_problem.CheckProblem(tables, None, {}, {})
    for packed in (True, False):
        lengths = small.lengths(packed, (1, heads))
        each = 5 if packed else 2
        assert len(lengths) == each * -(-4 // heads)
        x, rates = small.drawn(lengths, (1, heads)), set()
        for n, rows in enumerate(torch.split(x["g"], lengths)):
            if len(rows) >= 64:
                rates |= {min(small.RATES, key=lambda r, y=y: abs(r + float(y))) for y in rows.mean(0)}
            k, beta = (torch.split(x[name], lengths)[n] for name in ("k", "beta"))
            alike = (k[1:] == k[:-1]).flatten(1).all(1)
            assert alike.sum() == (min(63, lengths[n] - 57) if n % each == each - 1 else 0), "up to its sequence's end"
            assert (beta == small.ALIKE).sum() == (heads * int(alike.sum() + 1) if n % each == each - 1 else 0)
        assert rates == set(small.RATES)
    offsets = small.rate_offsets((1, heads))
    found = [float(small.drawn(lengths, (1, heads), 1.0, False, n)["rate"][0]) for n in offsets]
    assert found == pytest.approx([-2, -0.02] if heads < 4 else [-2])
    assert check_problem.CheckProblem(replace(tables, head_inputs=()), None, {}, {}).rate_offsets((1, 1)) == (0,)


@pytest.mark.slow
@pytest.mark.parametrize("contract", ["", "g=raw"])
def test_a_head_of_its_own_shows_what_comes_from_states(contract):
    """Triton compiles H and HV in, and calls without initial states on their own. Where a head forgets at once, a state changes
    the first tokens of a chunk alone."""
    if "triton" not in HERE:
        pytest.skip("needs Triton")
    good = text("triton", contract=contract, chunk=64)
    masked = r'D = tl\.exp2\(tl\.where\((i_C.*?), (G\[:, None\] - G\[None, :\]), float\("-inf"\)\) \* (.*?)\)\n'
    off = lambda text, heads: [not e <= most for e, most in module(text).check.errors(
        torch.device("cpu"), heads, ((True, False, True),)).values()]
    for find, put in ((r"q_S = tl\.dot\(q, S_f16\)", "q_S = 1.1 * tl.dot(q, S_f16)"),
                      (masked, r"D = tl.where(\1, 1.0, 0.0) * tl.exp2((\2) * \3)\n")):
        bad, n = re.subn(find, put, good)
        assert n, "nothing to break"
        for heads in ((1, 1), (1, 2)):
            assert not any(off(good, heads)) and any(off(bad, heads)), heads


def test_an_error_below_what_rounding_changes_is_accepted():
    """A gradient whose terms cancel may be smaller than what rounding errors of inputs change. A zero is refused all the same
    where it is larger."""
    want, change = torch.tensor([[0.01], [-0.01]]), torch.tensor([[0.05], [0.05]])
    assert check.off(torch.zeros(2, 1), want) == pytest.approx(1)
    assert check.off(want + 0.05, want, 16 * change) == pytest.approx(1 / 16)
    assert check.off(torch.zeros(2, 1), 100 * want, 16 * change) == pytest.approx(1)
    assert check.off(want * math.nan, want, 16 * change).isnan()


def test_rows_get_smaller_until_results_are_finite_in_every_dtype():
    """Of a page that adds k k^T S to its state for each token."""
    grows = ("def page(inputs, states, numbers):\n    (k,), (S,) = inputs, states\n    o = []\n    for t in range(k.shape[1]):\n"
             "        row = k[:, t:t + 1]\n        S = S + row.mT @ (row @ S)\n        o.append(row @ S)\n"
             "    return torch.cat(o, 1), S")
    space = {"torch": torch}
    exec(grows, space)
    tables = Tables("grows", "f", 64, "bthd", "float16", initial=(("S", (16, 16)),), inputs=(("k", "H", (16,), "float16"),),
                    outputs=(("o", (16,), "float16"),), kernels=(), ints={})
    c = check_problem.CheckProblem(tables, space["page"], {}, {})
    lengths = c.lengths(True, (2, 2))
    x, want = c.solved(lengths, (2, 2), True)
    states = (*want.finals, *want.after[0].values())
    assert 0 < want.outs[0].abs().max() < c.LARGEST and all(s.abs().max() < c.LARGEST for s in states)
    assert (x["k"].norm(dim=-1) > 0.1).all()
    assert not c.expected(c.drawn(lengths, (2, 2)), lengths, (2, 2), True).outs[0].abs().max() < 65504


# --- the page in torch -----------------------------------------------------------------------------------------------
@algorithm(q="C K", k="C K", v="C V", g="C", beta="C", S=carried("K V"), Z=carried("V K"))
def two_states(q, k, v, g, beta, S, Z, *, scale=0.5, low=-1.0):
    G = cumsum(g)
    D = exp(lower(G[:, None] - G[None, :], fill=-1e30))
    k = row_norm(k) * sigmoid(maximum(beta, low))[:, None]
    w = row_sum(q * k) / (1 + abs(beta))
    o = scale * (exp(G)[:, None] * (q @ S) + (D * (q @ k.T)) @ v) - w[:, None] * (q @ Z.T)
    S_next = exp(last(G)) * S + k.T @ (exp(last(G) - G)[:, None] * v)
    Z_next = Z + v.T @ k * log(1 + last(beta) * last(beta))
    return o, S_next, Z_next


@pytest.mark.parametrize("page", ["gated_delta_rule", two_states], ids=lambda x: getattr(x, "name", x))
def test_the_page_in_torch_is_the_page(page):
    """As the interpreter runs it, on three heads at once."""
    page = Build("triton").page if isinstance(page, str) else page
    p = replace(page.trace(), dims=(("C", 16), ("K", 4), ("V", 8)))
    space = {"torch": torch, "_unit_lower_inverse": check_problem._unit_lower_inverse}
    exec(page_text(p), space)
    gen = torch.Generator().manual_seed(0)
    tensors = {t.name: torch.randn(*((3,) if t.index == "sequence" else (16, 3)), *p.shape(t)[t.index == "token":], generator=gen,
                                   dtype=torch.float64) for t in p.role("input")}
    numbers = [0.3, -0.2][:len(p.scalars)]
    given = {n: x[None] if p.tensor(n).index == "sequence" else x for n, x in tensors.items()}
    want = interpret(p, Problem([16], 3, 3), given, dict(zip(p.scalars, numbers, strict=True)))
    got = space["_page"]([x.transpose(0, 1) for n, x in tensors.items() if p.tensor(n).index == "token"],
                         [x for n, x in tensors.items() if p.tensor(n).index == "sequence"],
                         [torch.tensor(n, dtype=torch.float64) for n in numbers])
    for t, x in zip(p.role("output"), got, strict=True):
        assert rms_error(x.transpose(0, 1) if t.index == "token" else x[None], want[t.name]) < 1e-12, t.name


# --- the op ----------------------------------------------------------------------------------------------------------
def inputs(lengths=(40,), K=16):
    x = problem(list(lengths), 2, 4, K, K)
    return x, [x[n][None] for n in ("q", "k", "v", "g", "beta")]


@pytest.fixture
def op(monkeypatch, tmp_path):
    """The op with a cache of its own, where modules of some builds are broken: their o lacks the scale."""
    if "tilelang" not in HERE:
        pytest.skip("needs TileLang")
    broken = set()

    def rendered(b):
        good = render(b)
        bad = good.replace("= scale * o_sum[i, j]", "= o_sum[i, j]")
        return bad if b.plan.name in broken and not changes(b.plan) else good

    def forget():
        admit.forget()
        launch.forget()
        load.module.cache_clear()
        choose.kept_choice.cache_clear()
        choose._refused.clear()

    monkeypatch.setenv("GDN_CODEGEN_CACHE", str(tmp_path))
    monkeypatch.setenv("GDN_CODEGEN_ADMIT", "1")
    monkeypatch.setattr(load, "render", rendered)
    tried = []
    forget()

    def run(*a, **options):
        return chunk_gated_delta_rule(*a, target="tilelang", chunk_size=16, **options)

    real = admit._verdict
    monkeypatch.setattr(admit, "_verdict", lambda b, m, *a: (_watch(m, tried), real(b, m, *a))[1])
    run.broken, run.tried, run.forget, run.folder = broken, tried, forget, tmp_path
    yield run
    forget()


def _watch(m, tried):
    """Note when kernels are tried."""
    if "errors" not in vars(m.check):
        errors = m.check.errors
        m.check.errors = lambda *a: (tried.append(m), errors(*a))[1]


def right(x, o):
    return rms_error(o[0], expected(x | {"S": None})[0]) < 5e-3


@pytest.mark.slow
def test_a_build_is_tried_once_and_its_verdict_kept(op, monkeypatch):
    x, a = inputs()
    for _ in range(2):
        assert right(x, op(*a)[0])
    x33, a33 = inputs((33,))
    assert right(x33, op(*a33)[0]) and len(op.tried) == 1
    (path,) = op.folder.rglob("*.verdicts/*.json")
    kept = json.loads(path.read_text())
    assert kept["wrong"] == [] and set(kept["errors"]) == {"o", "final_state", "memory beside out", "memory beside final_state"}
    assert kept["device"].startswith("cpu") and kept["versions"]["torch"] == torch.__version__ and "tilelang" in kept["versions"]

    op.forget()  # as in another process
    assert right(x, op(*a)[0]) and len(op.tried) == 1
    monkeypatch.setattr(admit, "driver", lambda device: "another")
    op.forget()
    assert right(x, op(*a)[0]) and len(op.tried) == 2


@pytest.mark.slow
@pytest.mark.parametrize("damaged", [b"", b"{", b"[]", b'{"wrong": []}', b"\xff"])
def test_a_damaged_verdict_is_made_again(op, damaged):
    _, a = inputs()
    op(*a)
    (path,) = op.folder.rglob("*.verdicts/*.json")
    whole = json.loads(path.read_text())
    path.write_bytes(damaged)
    op.forget()
    op(*a)
    assert len(op.tried) == 2 and {**json.loads(path.read_text()), "date": ""} == {**whole, "date": ""}


@pytest.mark.slow
def test_a_cache_that_cannot_be_written_does_not_matter(op, monkeypatch):
    x, a = inputs()
    def full(*a):
        raise OSError(28, "No space left on device")
    render_first = load.cached
    monkeypatch.setattr(load, "cached", lambda b: (render_first(b), monkeypatch.setattr(admit.cache, "write", full))[0])
    assert right(x, op(*a)[0]) and len(op.tried) == 1


@pytest.mark.slow
def test_a_refused_build_gives_way_to_the_next_which_is_said_once(op):
    x, a = inputs()
    op.broken.add("fused")
    with pytest.warns(RuntimeWarning, match="the kernels of tilelang gdn_c16_bthd_k16v16 give wrong results on cpu .*off are o "
                                            ".*Please report this line, and .*json.*Calls take another build") as said:
        assert right(x, op(*a)[0])
    assert len(said) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert right(x, op(*a)[0])
    choice = choice_for(a[0], a[2], "tilelang", 16)
    assert changes(choice.build.plan) and "not gdn_c16_bthd_k16v16" in str(choice)


@pytest.mark.slow
def test_a_named_schedule_gets_the_error_again_and_again(op):
    _, a = inputs()
    op.broken.add("fused")
    for _ in range(2):
        with pytest.raises(admit.Refused, match="GDN_CODEGEN_ADMIT=0 turns this check off"):
            op(*a, schedule="fused")
    assert len(op.tried) == 1, "the verdict was not read"


@pytest.mark.slow
def test_where_every_build_is_wrong_the_call_says_so(op, monkeypatch):
    _, a = inputs()
    op.broken.add("fused")
    monkeypatch.setattr(choose, "PORTABLE", (("fused", {}),))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(admit.Refused):
            op(*a)


@pytest.mark.slow
def test_it_can_be_turned_off(op, monkeypatch):
    x, a = inputs()
    op.broken.add("fused")
    monkeypatch.setenv("GDN_CODEGEN_ADMIT", "0")
    assert not right(x, op(*a)[0]) and not op.tried


@pytest.mark.slow
def test_a_capture_neither_tries_nor_settles(op, monkeypatch):
    x, a = inputs()
    op.broken.add("fused")
    with monkeypatch.context() as m:
        for module in (admit, launch):
            m.setattr(module, "captures", lambda device: True)
        for _ in range(3):
            op(*a)
        assert not op.tried
    with pytest.warns(RuntimeWarning):
        assert right(x, op(*a)[0])


def test_a_bad_call_is_refused_before_anything_is_tried(op):
    _, a = inputs()
    with pytest.raises(ValueError, match="beta"):
        op(*a[:4], a[4][:, :-1])
    with pytest.raises(ValueError, match="heads"):
        op(a[0][:, :, :1].expand(-1, -1, 3, -1), a[1][:, :, :1].expand(-1, -1, 3, -1), *a[2:])
    assert not op.tried


@pytest.mark.slow
def test_the_caller_sees_nothing_of_it(op):
    """Neither random numbers nor modes nor defaults, which do not disturb it either."""
    x, a = inputs()
    state, before = torch.get_rng_state(), torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.inference_mode():
            o = op(*a)[0]
        assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled() and len(op.tried) == 1
    finally:
        torch.set_default_dtype(before)
    assert right(x, o) and torch.equal(torch.get_rng_state(), state)


@pytest.mark.slow
def test_threads_wait_for_one_verdict(op):
    x, a = inputs()
    results, start = [], threading.Barrier(6)

    def call():
        start.wait()
        results.append(right(x, op(*a)[0]))
    threads = [threading.Thread(target=call) for _ in range(6)]
    for t in threads: t.start()
    for t in threads: t.join()
    assert results == [True] * 6 and len(op.tried) == 1


def as_on_a_gpu(monkeypatch):
    """What `admit` asks of a GPU, where there is none."""
    for n, value in (("captures", False), ("name", "a GPU"), ("driver", "1")):
        monkeypatch.setattr(admit, n, lambda device, value=value: value)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setenv("GDN_CODEGEN_ADMIT", "1")


def a_kind(H, HV, device="cuda:0", packed=True, wanted=True):
    return replace(a_call(Extent(H, HV, 1, 64), device=device), packed=packed, wanted=wanted)


def test_kernels_that_end_a_process_are_passed_over_by_the_next(monkeypatch, tmp_path):
    """An illegal access leaves no context to go on in: the error says so, and another process refuses the build by its file."""
    class Module:
        __file__ = str(tmp_path / "module.py")

        class check:
            done = set()

            def errors(device, *a):
                raise RuntimeError("CUDA error: an illegal memory access was encountered")

    as_on_a_gpu(monkeypatch)
    call = a_kind(2, 4)
    try:
        with pytest.raises(RuntimeError, match="Another process passes this build over") as e:
            admit.admit(Build("triton"), Module, call, lambda: None)
        assert not isinstance(e.value, admit.Refused)
        admit.forget()
        with pytest.raises(admit.Refused, match="off are memory by inf"):
            admit.admit(Build("triton"), Module, call, lambda: None)
    finally:
        admit.forget()


def test_triton_is_tried_for_heads_and_kinds_of_calls(monkeypatch, tmp_path):
    """For what it compiles, on what stands for a GPU; a result without a number is wrong."""
    asked, error, gpu = [], [0.0], torch.device("cuda", 0)

    class Module:
        __file__ = str(tmp_path / "module.py")

        class check:
            done = set()
            errors = lambda device, *a: asked.append(a) or {"o": (error[0], 1e-2)}

    as_on_a_gpu(monkeypatch)
    b, call = Build("triton"), (True, False, True)
    try:
        for heads in ((2, 4), (2, 4), (4, 4)):
            admit.admit(b, Module, a_kind(*heads), lambda: None)
        admit.admit(b, Module, a_kind(4, 4, packed=False, wanted=False), lambda: None)
        assert asked == [((2, 4), (call,)), ((4, 4), (call,)), ((4, 4), ((False, False, False),))]
        assert Module.check.done == {(gpu, (2, 4)), (gpu, (4, 4))}
        error[0] = math.nan
        with pytest.raises(admit.Refused, match="off are o by nan"):
            admit.admit(b, Module, a_kind(8, 8), lambda: None)
        assert (gpu, (8, 8)) not in Module.check.done
        admit.admit(b, Module, a_kind(8, 8, "cpu"), lambda: pytest.fail("Triton's interpreter compiles nothing"))
    finally:
        admit.forget()
