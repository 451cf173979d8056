"""Shapes and layouts that callers pass, on each target: head dims that tiles are padded for, no tokens, no sequences, rows of no
sequence, a buffer for o, views. What lies around the tensors is NaN, so that a read of it shows, and stays what it was."""
import re
from dataclasses import replace

import pytest
import torch
from choices import choice_for
from reference import TOLERANCE, expected, module, problem, rms_error

from gdn_codegen import chunk_gated_delta_rule
from gdn_codegen.runtime import load
from gdn_codegen.runtime.build import Build, render
from gdn_codegen.runtime.call import choose, launch
from gdn_codegen.runtime.load import function
from gdn_codegen.runtime.targets import runs
from gdn_codegen.schedule import SCHEDULES, ScheduleError, varied
from gdn_codegen.schedule.contract import Contract
from gdn_codegen.targets import OWN

HERE = [t for t in OWN if runs(t, "cpu")]
VIEWS = Contract(strided=True)
LEFT = 7.0  # what a buffer holds before a call


def build(target, K=36, V=60, chunk=16, schedule="fused", v_block=0, **more):
    return Build(target, chunk, schedule=replace(SCHEDULES[schedule], v_block=v_block), head_dim_k=K, head_dim_v=V, **more)


def here(*rows):
    """Parameters: a target, what to build for it, and marks."""
    return [pytest.param(t, more, id="-".join([t, *map(str, more.values())]), marks=m) for t, more, *m in rows if t in HERE]


# --- tensors amid others ---------------------------------------------------------------------------------------------
def amid(x, value, gap=64):
    """`x`, dense, with `gap` elements of `value` before and after it; and these."""
    whole = torch.full((x.numel() + 2 * gap,), value, dtype=x.dtype)
    inner = whole[gap:gap + x.numel()].view(x.shape)
    inner.copy_(x)
    return inner, (whole[:gap], whole[gap + x.numel():])


def apart(x, value, gap=8):
    """`x` as a view whose rows, heads, tokens and batches have `value` between them."""
    whole = torch.full([n + gap for n in x.shape], value, dtype=x.dtype)
    view = whole[tuple(slice(0, n) for n in x.shape)]
    view.copy_(x)
    return view


def shaped(x, layout, rows=1, more=0):
    """Packed tokens as a caller passes them, with `more` of NaN after them that are no sequence's."""
    x = torch.cat([x, torch.full((more, *x.shape[1:]), float("nan"), dtype=x.dtype)]) if more else x
    x = x.reshape(rows, x.shape[0] // rows, *x.shape[1:])
    return x if layout == "bthd" else x.transpose(1, 2).contiguous()


def names(x):
    return {n: x[n] for n in ("q", "k", "v", "g", "beta")}


def ends(x):
    return torch.tensor([0, *x["lengths"]]).cumsum(0).to(torch.int32)


def run(fn, x, layout="bthd", more=5, how=None, **options):
    """o and the final state of a packed problem, where `how` puts tensors (amid NaN, apart); asserts what must stay."""
    how = how or (lambda t: amid(t, float("nan"))[0])
    given = {n: how(shaped(t, layout, more=more)) for n, t in names(x).items()}
    kept = {n: t.clone() for n, t in given.items()}
    out, around = amid(shaped(torch.zeros_like(x["v"]), layout, more=more), LEFT)
    out.fill_(LEFT)
    o, S = fn(**given, initial_state=amid(x["S"], float("nan"), 4096)[0], output_final_state=True, cu_seqlens=ends(x), out=out,
              **options)
    assert o is out and all((t == LEFT).all() for t in around), "written outside of o"
    assert all(torch.equal(t, kept[n]) or (t.isnan() == kept[n].isnan()).all() for n, t in given.items())
    o = (o if layout == "bthd" else o.transpose(1, 2))[0]
    tokens = sum(x["lengths"])
    assert (o[tokens:] == LEFT).all(), "rows of no sequence were written"
    return o[:tokens], S


def agrees(fn, x, tolerance=5e-3, **options):
    want_o, want_S = expected(x)
    o, S = run(fn, x, **options)
    got = rms_error(o, want_o), rms_error(S, want_S)
    assert max(got) <= tolerance, f"o {got[0]:.1e}, S {got[1]:.1e}"


# --- head dims -------------------------------------------------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.parametrize("target, more", here(
    ("triton", dict(K=36, V=60)), ("triton", dict(K=100, V=36, schedule="staged", dtype="float32", layout="bhtd")),
    ("triton", dict(K=60, V=36, schedule="walk", layout="bnsd")), ("triton", dict(K=36, V=100, schedule="prepared", chunk=32)),
    ("triton", dict(K=100, V=36, schedule="staged", layout="bhtd", contract=VIEWS)),
    ("tilelang", dict(K=36, V=60)), ("tilelang", dict(K=60, V=100, schedule="walk", v_block=32, layout="bhtd", contract=VIEWS)),
    ("tilelang", dict(K=100, V=36, schedule="staged", dtype="float32")),
    ("pto", dict(K=36, V=60)), ("pto", dict(K=60, V=36, dtype="float32", layout="bhtd")),
    ("pto", dict(K=60, V=36, layout="bhtd", contract=VIEWS)), ("pto", dict(K=36, V=100, schedule="staged", v_block=16)),
    *((*x, pytest.mark.long) for x in (
        ("triton", dict(K=60, V=192, schedule="replay", v_block=64)), ("triton", dict(K=192, V=100, dtype="bfloat16")),
        ("triton", dict(K=36, V=60, contract=VIEWS))))))
def test_padded_tiles_read_and_write_what_there_is(target, more):
    b, views = build(target, **more), more.get("contract") == VIEWS
    x = problem([b.chunk + 5, 0, 7], 2, 4, b.head_dim_k, b.head_dim_v, getattr(torch, b.dtype))
    agrees(lambda **a: function(b)(**a), x, TOLERANCE[b.dtype], layout=b.layout,
           how=(lambda t: apart(t, float("nan"))) if views else None)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["exact", "decay"])
def test_padded_tiles_in_parts(how, monkeypatch):
    b = build("triton", 36, 36, schedule="replay")
    b = replace(b, schedule=replace(b.plan, partition=how))
    m = module(render(b))
    monkeypatch.setattr(m.HOST, "part_chunks", 2)
    agrees(m.chunk_gated_delta_rule, problem([100, 3], 1, 2, 36, 36, gate=-0.01))


def test_a_page_of_another_kind_is_padded_too():
    b = replace(build(HERE[0], 60, 36), algorithm="simple_gla")
    x = problem([21, 7], 1, 2, 60, 36)
    want_o, want_S = expected(x, delta=False)
    given = {n: amid(shaped(t, "bthd"), float("nan"))[0] for n, t in names(x).items() if n != "beta"}
    o, S = function(b)(**given, initial_state=x["S"], output_final_state=True, cu_seqlens=ends(x))
    assert rms_error(o[0], want_o) < 5e-3 and rms_error(S, want_S) < 5e-3


def changed(b, old, new, count=0):
    text = render(b)
    found = len(re.findall(old, text))
    assert found, old
    return module(re.sub(old, new, text, count=count)).chunk_gated_delta_rule


@pytest.mark.slow
@pytest.mark.parametrize("old, new", [
    (r" & \(i_K < K\)\[None, :\]", ""), (r"valid\[:, None\] & \(i_V < V\)\[None, :\]", "valid[:, None]"),
    (r"mask=\(i_K < K\)\[:, None\] & (.*, other)", r"mask=\1"),
    (r'"scale": [0-9.e-]+', '"scale": 0.125')])
def test_without_a_mask_or_with_the_padded_k_it_would_be_wrong(old, new):
    b = build("triton")
    x = problem([21, 0, 7], 2, 4, 36, 60)
    agrees(function(b), x)
    with pytest.raises(AssertionError):
        agrees(changed(b, old, new), x)


@pytest.mark.slow
@pytest.mark.parametrize("stride", ["q_stride_b", "k_stride_t", "v_stride_h", "beta_stride_t", "o_stride_t"])
def test_without_a_stride_it_would_be_wrong(stride):
    b = build("triton", 32, 32, contract=VIEWS)
    x = problem([21, 21], 2, 4, 32, 32)

    def call(fn):
        given = {n: apart(shaped(t, "bthd", rows=2), 0.5) for n, t in names(x).items()}
        out = apart(torch.zeros(2, 21, 4, 32, dtype=torch.float16), LEFT)
        return fn(**given, out=out)[0].reshape(42, 4, 32)
    want = expected(dict(x, S=None))[0]
    assert rms_error(call(function(b)), want) < 5e-3
    dense = {"q": "(T * H * K)", "k": "(H * K)", "v": "V", "beta": "HV", "o": "(HV * V)"}[stride.split("_")[0]]
    name = "row" if stride.endswith("_t") else "[a-z]+"
    wrong = changed(b, rf"({name}\S*) \* {stride}\b", rf"\1 * {dense if 'T' not in dense else '1'}")
    assert not rms_error(call(wrong), want) < 0.05


def test_scale_is_that_of_the_true_k():
    x = problem([9], 1, 1, 36, 36)
    default, given = (function(build(HERE[0], 36, 36))(**{n: shaped(t, "bthd") for n, t in names(x).items()}, **s)[0]
                      for s in ({}, {"scale": 36 ** -0.5}))
    assert torch.equal(default, given)


@pytest.mark.parametrize("n", [15, 17, 34, 20, 28, 260, 0, -64])
def test_other_head_dims_are_refused(n):
    with pytest.raises(ValueError, match=f"head_dim_v: got {n}; accepted: 16, and multiples of 4 from 32 to 256"):
        Build("triton", head_dim_v=n)


# --- nothing, and less than there is ---------------------------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.parametrize("target", HERE)
@pytest.mark.parametrize("views", [False, True])
def test_no_batch_no_tokens_and_empty_sequences(target, views):
    fn = function(build(target, 36, 36, contract=VIEWS if views else Contract()))
    for rows, tokens in ((0, 5), (2, 0), (0, 0), (3, 1)):
        x = problem([tokens] * rows, 1, 2, 36, 36)
        given = {n: t.reshape(rows, tokens, *t.shape[1:]) for n, t in names(x).items()}
        o, S = fn(**given, initial_state=x["S"], output_final_state=True)
        assert o.shape == (rows, tokens, 2, 36) and S.shape == (rows, 2, 36, 36)
        if rows and not tokens:
            assert torch.equal(S, x["S"])
    x = problem([0, 0], 1, 2, 36, 36)
    o, S = fn(**{n: t[None] for n, t in names(x).items()}, initial_state=x["S"], output_final_state=True, cu_seqlens=ends(x))
    assert o.shape == (1, 0, 2, 36) and torch.equal(S, x["S"])
    with pytest.raises(ValueError, match=r"cu_seqlens: got shape \(1,\); accepted: shape \[N \+ 1\] with N >= 1"):
        fn(**{n: t[None] for n, t in names(x).items()}, cu_seqlens=torch.zeros(1, dtype=torch.int32))


@pytest.mark.parametrize("target, chunk", [pytest.param(t, c, marks=[] if t == "triton" and c <= 64 else pytest.mark.slow)
                                           for c in (16, 32, 64, 128) for t in HERE if t == "triton" or c in (16, 128)])
def test_each_chunk(target, chunk):
    """On other targets than Triton, other tests run chunks of 32 and 64."""
    b = build(target, 32, 32, chunk)
    agrees(function(b), problem([chunk + 3, 2], 1, 3, 32, 32))


# --- a caller's buffer -----------------------------------------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.parametrize("target", HERE)
@pytest.mark.parametrize("views", [False, True])
def test_a_buffer_need_not_be_dense(target, views):
    b = build(target, 32, 32, contract=VIEWS if views else Contract())
    x = problem([19], 1, 2, 32, 32)
    given = {n: shaped(t, "bthd") for n, t in names(x).items()}
    want = function(b)(**given)[0]
    whole = torch.full((1, 30, 4, 48), LEFT, dtype=torch.float16)
    out = whole[:, 3:22, 1:3, 8:40]
    o, _ = function(b)(**given, out=out)
    assert o is out and torch.equal(o, want)
    out.fill_(LEFT)
    assert (whole == LEFT).all()
    o, _ = function(b)(**given, out=out, cu_seqlens=torch.tensor([0, 4, 9]))
    assert (o[:, 9:] == LEFT).all() and not (o[:, :9] == LEFT).any()


@pytest.mark.parametrize("out, message", [
    (torch.zeros(1, 9, 2, 32), r"out: got torch.float32 on cpu; accepted: torch.float16 on cpu"),
    (torch.zeros(1, 9, 2, 36).half(), r"out: got \(1, 9, 2, 36\); accepted: shape \(1, 9, 2, 32\)"),
    (torch.zeros(1, 9, 32, 2).half().transpose(2, 3), r"out: got strides \(576, 64, 1, 2\); accepted: a last dim that is dense"),
    (torch.zeros(1, 9, 1, 32).half().expand(1, 9, 2, 32), r"out: got strides .* and elements that do not overlap"),
    ("o", "out: got str; accepted: a torch.Tensor")])
def test_a_buffer_that_does_not_fit_is_refused(out, message):
    x = problem([9], 1, 2, 32, 32)
    with pytest.raises(ValueError, match=message):
        function(build("triton", 32, 32))(**{n: shaped(t, "bthd") for n, t in names(x).items()}, out=out)


# --- views -----------------------------------------------------------------------------------------------------------
def projections(x, layout, gap=8):
    """q, k and v as slices of one projection, g and beta as slices of another; layout bhtd by swapped dims."""
    T, H, K = x["q"].shape
    HV, V = x["v"].shape[1:]
    whole = torch.full((1, T, 2 * H * K + HV * V + gap), float("nan"), dtype=x["q"].dtype)
    gates = torch.full((1, T, 2 * HV), float("nan"))
    parts = whole[..., :2 * H * K + HV * V].split([H * K, H * K, HV * V], dim=-1)
    views = [p.view(1, T, h, d) for p, h, d in zip(parts, (H, H, HV), (K, K, V), strict=True)] + list(gates.split(HV, dim=-1))
    for view, t in zip(views, names(x).values(), strict=True):
        view.copy_(t[None])
    return dict(zip(names(x), (v if layout == "bthd" else v.transpose(1, 2) for v in views), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("target, more", here(
    ("triton", dict(K=60, V=36, schedule="staged", dtype="bfloat16", layout="bhtd")), ("tilelang", dict(K=32, V=64)),
    ("pto", dict(K=36, V=32, schedule="staged", layout="bhtd")), ("triton", dict(K=32, V=64), pytest.mark.long),
    ("tilelang", dict(K=32, V=64, layout="bhtd"), pytest.mark.long), ("pto", dict(K=32, V=64), pytest.mark.long)))
def test_slices_of_a_projection_equal_dense_tensors_to_the_bit(target, more, monkeypatch):
    b = build(target, **more)
    layout = b.layout
    x = problem([b.chunk + 5, 0, 20], 1, 2, b.head_dim_k, b.head_dim_v, getattr(torch, b.dtype))
    cu = ends(x)
    views = projections(x, layout)
    m = module(render(replace(b, contract=VIEWS)))
    want = function(b)(**{n: t.contiguous() for n, t in views.items()}, initial_state=x["S"], output_final_state=True,
                       cu_seqlens=cu)
    if target == "pto" and layout == "bhtd":  # whose gates are read by heads, a row of tokens each
        views |= {n: views[n].contiguous() for n in ("g", "beta")}
    monkeypatch.setattr(m, "_plain", lambda *a: pytest.fail("copied"))
    got = m.chunk_gated_delta_rule(**views, initial_state=x["S"], output_final_state=True, cu_seqlens=cu)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("target", HERE)
def test_views_that_kernels_do_not_take_are_copied(target):
    """Columns apart; a row that begins between 16 bytes; strides of an odd number of elements; no stride at all."""
    b = build(target, 32, 32)
    x = problem([20], 1, 2, 32, 32)
    dense = {n: shaped(t, "bthd") for n, t in names(x).items()}
    want = function(b)(**dense)[0]
    odd = torch.zeros(1, 20, 2, 33, dtype=torch.float16)
    odd[..., 1:] = dense["v"]
    views = dict(dense, q=dense["q"].repeat_interleave(2, 3)[..., ::2], v=odd[..., 1:])
    assert torch.equal(function(replace(b, contract=VIEWS))(**views)[0], want)
    one = dict(dense, k=dense["k"][:, :1].expand(1, 20, 1, 32), g=dense["g"][:, :, :1].expand(1, 20, 2))
    assert torch.equal(function(replace(b, contract=VIEWS))(**one)[0], function(b)(**{n: t.clone() for n, t in one.items()})[0])


def test_the_op_takes_the_build_for_views(monkeypatch):
    x = problem([20], 1, 2, 32, 32)
    built = []
    monkeypatch.setattr(launch, "module", lambda b: (built.append(b), load.module(b))[1])
    monkeypatch.setattr(launch, "_kept", {})
    views = projections(x, "bthd")
    dense = {n: t.contiguous() for n, t in views.items()}
    results = [chunk_gated_delta_rule(**given, target="triton", chunk_size=16, layout=layout)[0]
               for given, layout in ((dense, "bthd"), (views, "bsnd"), (dict(dense, g=views["g"]), "bthd"),
                                     (dict(dense, q=dense["q"].mT.contiguous().mT), "bthd"))]
    assert [b.contract.strided for b in built] == [False, True, True]  # the last, which is copied, is of the first kind
    assert all(torch.equal(r, results[0]) for r in results)


@pytest.mark.slow
@pytest.mark.parametrize("target", [t for t in HERE if t != "pto"])
def test_offsets_past_2_to_the_31(target):
    """Few tokens, far apart: memory that is not touched costs nothing."""
    b = build(target, 32, 32, 64, contract=VIEWS)
    x = problem([70], 1, 1, 32, 32)
    far = 2**25
    whole = torch.empty(70 * far, dtype=torch.float16)
    view = whole.as_strided((1, 70, 1, 32), (70 * far, far, 32, 1))
    view.copy_(shaped(x["v"], "bthd"))
    given = {n: shaped(t, "bthd") for n, t in names(x).items()}
    want = function(b)(**given)[0]
    assert torch.equal(function(b)(**dict(given, v=view))[0], want)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["triton", "tilelang", "pto"])
def test_addresses_of_tensors_are_in_64_bits(name):
    text = render(Build(name, schedule="staged", head_dim_k=64, head_dim_v=64))
    if name == "triton":  # a row, a slot and a sequence are 64 bits wide before they are multiplied
        assert "start = tl.load(cu_seqlens + n).to(tl.int64)" in text and "slot = (pid // HV).to(tl.int64)" in text
        wide = r"\(((?:row|slot)(?:_next|_rest)?|n\.to\(tl\.int64\)) \* H"
        assert all(re.search(wide, x) for x in re.findall(r"_ptr \+ .*", text))
    elif name == "pto":
        assert not re.search(r"(?<!u)\bint(32_t)? (?!main)\w+ = ", text.split("SOURCE = ")[1].split("'''")[1])
        assert "int64_t token_at(int64_t heads, int64_t head, int64_t dim, int64_t b, int64_t tokens, int64_t t)" in text
    else:
        tilelang = pytest.importorskip("tilelang")
        m = module(text)
        target = tilelang.tvm.target.Target({"kind": "cuda", "arch": "sm_90a"})
        with tilelang.tvm.transform.PassContext(config=m._launcher.passes["o"]), target:
            source = tilelang.lower(m._launcher.program("o"), target=target).kernel_source
        body = source[source.rindex("__launch_bounds__"):]
        found = re.findall(r"\b\w+_(?:in|out|ws)(?:\[| \+ )\(*(\S+)", body)
        assert found and all(x.startswith("int64_t)") for x in found), found


# --- what fits -------------------------------------------------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.parametrize("target, chunk, K, V, dtype, name", [
    ("triton", 64, 256, 256, "float16", "gdn_c64_bthd_k256v256_fused_vblock64"),
    ("triton", 64, 128, 128, "float16", "gdn_c64_bthd"),
    ("triton", 64, 192, 256, "float32", "gdn_c64_bthd_k192v256_f32_fused_vblock32"),
    ("tilelang", 64, 256, 256, "float16", "gdn_c64_bthd_k256v256_fused_vblock64"),
    ("tilelang", 64, 192, 192, "bfloat16", "gdn_c64_bthd_k192v192_bf16_fused_vblock64"),
    ("tilelang", 64, 256, 256, "float32", "gdn_c64_bthd_k256v256_f32_fused_vblock32"),
    ("tilelang", 128, 256, 256, "float16", "gdn_c128_bthd_k256v256_replay_vblock32"),
    ("tilelang", 64, 60, 100, "float16", "gdn_c64_bthd_k60v100")])
def test_where_the_schedule_is_open_one_that_fits_is_taken(target, chunk, K, V, dtype, name):
    q, v = (torch.empty(1, 8, 2, n, dtype=getattr(torch, dtype)) for n in (K, V))
    assert choice_for(q, v, target, chunk).build.name == name


@pytest.mark.slow
def test_what_does_not_fit_says_the_bytes():
    assert "takes about 294912 bytes of shared memory" in choose.unfit(
        Build("triton", 128, schedule=varied("fused", v_block=32), head_dim_k=256, head_dim_v=256))
    with pytest.raises(ScheduleError, match=r"shared of hopper has 232448 bytes, \d+ are needed"):
        render(Build("tilelang", 128, head_dim_k=256, head_dim_v=256))
    with pytest.raises(ScheduleError, match=r"has \d+ bytes, and at the fullest point \d+ are live"):
        render(Build("pto", 128, head_dim_k=256, head_dim_v=256))


@pytest.mark.slow
def test_warp_groups_take_rows_of_whole_16_bytes():
    for K, V in ((96, 120), (64, 56), (128, 128)):
        text = render(Build("tilelang", schedule="walk", arch="sm_90a", head_dim_k=K, head_dim_v=V, contract=VIEWS))
        assert ("if j < V:" in text) == (V == 120 or V == 56)
    with pytest.raises(ScheduleError, match="k has rows of 200 bytes; copies of tiles need multiples of 16"):
        render(Build("tilelang", schedule="walk", arch="sm_90a", head_dim_k=100, head_dim_v=128))
