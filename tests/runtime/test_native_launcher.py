"""A settled call as one compiled function: the same bits as through Python, and nothing on arguments of other kinds.

TileLang's kernels for the CPU start only from Python, so here a function that `lent.cc` makes stands before each of them: the
chain calls it as it does kernels on a GPU.
"""
import shutil
import subprocess
import threading
from functools import lru_cache, partial
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from gdn_codegen import chunk_gated_delta_rule, recurrent_gated_delta_rule
from gdn_codegen.runtime import cache
from gdn_codegen.runtime.build import render
from gdn_codegen.runtime.call import launch as calls
from gdn_codegen.runtime.call import native_launcher
from gdn_codegen.runtime.call.native_launcher import ARGUMENT, FIXED, WORKSPACE, Asked, launcher, row
from gdn_codegen.runtime.load import import_path

pytest.importorskip("tilelang")
pytest.importorskip("tvm_ffi")

import tvm_ffi

from gdn_codegen.host.tilelang import _as_data
from gdn_codegen.targets import machine

pytestmark = [pytest.mark.slow,  # the first compiles the launcher
              pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="needs a C++ compiler")]
NONE = Path("nothing was compiled ahead")
#: Where the library of other tests is.
KNOWN = cache.folder() / "native_launcher"


@pytest.fixture(autouse=True)
def compiled():
    """The first call of a kind that came before is not to go through Python because the library is still being compiled."""
    native_launcher.ready(NONE, wait=True)


@lru_cache
def lent():
    source = Path(__file__).with_name("lent.cc")
    about = tvm_ffi.libinfo
    def compile_to(path):
        subprocess.run([machine.cxx(), "-std=c++17", "-O1", "-shared", "-fPIC", f"-I{about.find_include_path()}", str(source),
                        f"-I{about.find_dlpack_include_path()}", "-o", str(path), about.find_libtvm_ffi()], check=True)
    path = cache.made(cache.folder() / "tests" / f"lent_{cache.digest(source.read_bytes(), tvm_ffi.__version__)}.so", compile_to)
    return tvm_ffi.load_module(str(path)).lent


def loaded(b, started, poison):
    """The module of a build, which looks at no values of CPU tensors, and whose kernels can be chained: (name, by whom)."""
    text = render(b)
    eager = 'looks = host.check or self.device.type == "cpu"'
    assert eager in text
    text = text.replace(eager, "looks = host.check")
    m = import_path(cache.write(cache.folder() / "texts" / f"chained_{cache.digest(text)}.py", text))
    plain = vars(m).setdefault("_plain_launcher", m.HOST.launcher)

    def launcher(name, *rest):
        run = plain(name, *rest)
        _, _, _, tensors, numbers = next(row for row in m.TABLES.kernels if row[0] == name)
        fixed = run.__code__.co_freevars.index("fixed")

        def start(*args):
            started.append((name, "chain"))
            given = [torch.from_dlpack(x) for x in args[:len(tensors) + 1]]
            run(given[:-1], given[-1], args[len(args) - len(numbers):] if numbers else [])

        def launch(*args):
            started.append((name, "python"))
            run(*args)

        launch.compiled = partial(_as_data, lent()(start), run.__closure__[fixed].cell_contents)
        return launch

    m.HOST.launcher, m.HOST.poison = launcher, poison
    m.HOST.plans.clear()
    return m


@pytest.fixture
def poison():
    """Whether outputs and workspaces start as NaN: workspaces are the chain's own where they do not."""
    return True


@pytest.fixture
def started(monkeypatch, poison):
    """Which kernels the op starts, and how."""
    seen = []
    monkeypatch.setattr(calls, "module", lambda b: loaded(b, seen, poison))
    calls.forget()
    yield seen
    calls.forget()


def tensors(tokens=40, seed=0, layout="bthd", dtype=torch.float16):
    torch.manual_seed(seed)
    lie = (lambda x: x.transpose(1, 2).contiguous()) if layout == "bhtd" else (lambda x: x)
    q, v = torch.randn(1, tokens, 2, 16), torch.randn(1, tokens, 4, 16)
    k = torch.nn.functional.normalize(torch.randn(1, tokens, 2, 16), dim=-1)
    return dict(q=lie(q.to(dtype)), k=lie(k.to(dtype)), v=lie(v.to(dtype)), g=lie(-torch.rand(1, tokens, 4)),
                beta=lie(torch.rand(1, tokens, 4)))


def pool(x):
    return dict(x, cu_seqlens=torch.tensor([0, 11, 40], dtype=torch.int32), state_indices=torch.tensor([2, 0], dtype=torch.int32),
                initial_state=torch.randn(3, 5, 16, 16)[:, :4])


def slices(x):
    """q, k and v as slices of one tensor."""
    whole = torch.cat([x[n] for n in "qkv"], dim=2)
    return dict(x, **dict(zip("qkv", whole.split([2, 2, 4], dim=2), strict=True)))


FORMS = {
    "rows": lambda x: x,
    "packed, with states": lambda x: dict(x, cu_seqlens=torch.tensor([0, 11, 40], dtype=torch.int32), output_final_state=True,
                                          initial_state=torch.randn(2, 4, 16, 16)),
    "states only read": lambda x: dict(x, initial_state=torch.randn(1, 4, 16, 16), scale=0.5),
    "buffers": lambda x: dict(x, out=torch.empty_like(x["v"]), final_state=torch.empty(1, 4, 16, 16)),
    "in place": lambda x: dict(x, initial_state=torch.randn(1, 4, 16, 16), inplace_final_state=True),
    "a pool": pool,
    "slices": slices,
    "raw gates": lambda x: dict(x, gate="raw", A_log=torch.rand(4), dt_bias=torch.rand(4)),
}


#: What a call overwrites. torch then knows of it, so that a gradient that needs the old values is refused.
WRITTEN = {"buffers": {"out", "final_state"}, "in place": {"initial_state"}, "a pool": {"initial_state"}}


@pytest.mark.parametrize("form, poison", [*((f, True) for f in FORMS), ("rows", False), ("packed, with states", False)])
def test_it_gives_the_bits_that_python_gives(form, started):
    def run(seed):
        said = FORMS[form](tensors(seed=seed))
        before = {n: x._version for n, x in said.items() if isinstance(x, torch.Tensor)}
        results = chunk_gated_delta_rule(**said, target="tilelang", chunk_size=16, schedule="walk")
        assert {n for n, v in before.items() if said[n]._version != v} == WRITTEN.get(form, set())
        return said, results, [x.clone() for x in said.values() if isinstance(x, torch.Tensor)]

    def taken():
        by, started[:] = {how for _, how in started}, []
        return by

    first = run(1)
    assert taken() == {"python"}
    run(2)
    assert taken() == {"chain"}  # and nothing of it stays behind:
    again = run(1)
    assert taken() == {"chain"}
    for ours, theirs in zip((*again[1], *again[2]), (*first[1], *first[2]), strict=True):
        assert (ours is None and theirs is None) or (torch.equal(ours, theirs) and ours.isfinite().all())
    assert (again[1][1] is None) == (form in ("rows", "states only read", "slices", "raw gates"))
    for name, result in (("out", again[1][0]), ("final_state", again[1][1])):
        assert name not in again[0] or result is again[0][name]
    if form == "buffers":
        given = tensors()
        with pytest.raises(ValueError, match="out: got memory of v"):
            chunk_gated_delta_rule(**given, out=given["v"], final_state=torch.empty(1, 4, 16, 16), target="tilelang",
                                   chunk_size=16, schedule="walk")
        assert taken() == set()
    if form in ("in place", "a pool"):
        assert again[1][1] is again[0]["initial_state"]


def whole(*x):
    return torch.tensor(x, dtype=torch.int32)


STEPS = {
    "slots": lambda x: dict(state_indices=whole(*range(8)).view(2, 4), num_accepted_tokens=whole(1, 3)),
    "a tree in slots": lambda x: dict(state_indices=whole(*range(8)).view(2, 4),
                                      retrieve_parent_token=whole(-1, 0, 0, 1).expand(2, 4).contiguous()),
    "rows": lambda x: dict(state_indices=whole(2, 0), intermediate_state_indices=whole(1, 0), disable_state_update=True,
                           intermediate_states_buffer=torch.zeros(2, 5, 4, 16, 16)),
    "rows in order": lambda x: dict(state_indices=whole(2, 0), disable_state_update=True,
                                    intermediate_states_buffer=torch.zeros(2, 5, 4, 16, 16)),
    "rows in order, and a final state": lambda x: dict(state_indices=whole(2, 0),
                                                       intermediate_states_buffer=torch.zeros(2, 5, 4, 16, 16)),
    "no state": lambda x: dict(state_indices=whole(2, 0), disable_state_update=True),
    "a final state": lambda x: dict(state_indices=whole(2, 0), inplace_final_state=False, output_final_state=True),
    "another pool": lambda x: dict(state_indices=whole(2, 0), final_state=torch.zeros(4, 5, 16, 16)[:, :4]),
}


@pytest.mark.parametrize("form", STEPS)
def test_states_by_token_are_chained(form, started):
    """In place, in a buffer, elsewhere or nowhere: each run starts from the same states, and writes the same bits."""
    x = {n: y.unflatten(1, (2, 4)).squeeze(0) for n, y in tensors(8).items()}
    more, pool = STEPS[form](x), torch.randn(9, 4, 16, 16)
    held = [more[n] for n in ("intermediate_states_buffer", "final_state") if n in more]
    written = []
    for _ in range(4):
        states = pool.clone()
        for y in held:
            y.fill_(float("nan"))
        o, final = recurrent_gated_delta_rule(**x, initial_state=states, target="tilelang", **more)
        assert final is None or final is more.get("final_state", states) or form == "a final state"
        written.append((o, states, torch.zeros(1) if final is None else final.clone(), *(y.clone() for y in held)))
    assert [by for _, by in started][-4:] == ["python", *["chain"] * 3]
    for again in written[1:]:
        assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(written[0], again, strict=True))
    assert (written[0][1] != pool).any() == (form in ("slots", "a tree in slots", "rows in order, and a final state"))
    _, _, final, *memory = written[0]
    assert not final.isnan().all(), "a final state is written"
    if "rows" in form:
        assert memory[0][:, :4].isfinite().all() and memory[0][:, 4:].isnan().all()
    if form == "another pool":
        assert memory[0][[2, 0]].isfinite().all() and memory[0][[1, 3]].isnan().all()


def test_an_argument_given_twice_is_two(started):
    x = tensors()
    ask = dict(target="tilelang", chunk_size=16, schedule="walk")
    chunk_gated_delta_rule(**dict(x, q=x["k"], g=x["beta"]), **ask)
    o, _ = chunk_gated_delta_rule(**x, **ask)
    assert started[-1][1] == "chain"
    calls.forget()
    expected, _ = chunk_gated_delta_rule(**x, **ask)
    assert torch.equal(o, expected) and started[-1][1] == "python"


def test_what_is_not_the_same_call_is_not_taken_for_it(started):
    x = tensors()
    ask = dict(target="tilelang", chunk_size=16, schedule="walk")

    def call(changed, **said):
        with torch.no_grad():
            return chunk_gated_delta_rule(**dict(x, **changed), **dict(ask, **said))

    first, _ = call({})
    state = torch.randn(1, 4, 16, 16)
    ends = torch.tensor([0, 40], dtype=torch.int32)
    for changed in (dict(output_final_state=True), dict(initial_state=state), dict(cu_seqlens=ends), dict(tensors(tokens=56)),
                    dict(g=x["g"].half()), dict(scale=0.5), dict(out=torch.empty_like(x["v"]))):
        started.clear()
        call({})
        assert started[-1][1] == "chain"
        o, S = call(changed)
        calls.forget()
        expected, T = call(changed)
        assert torch.equal(o, expected) and (S is T or torch.equal(S, T)), changed
        assert torch.equal(call({})[0], first)
    with pytest.raises(ValueError, match="chunk_size"):
        call({}, chunk_size=24)
    with pytest.raises(ValueError, match="use_qk_l2norm_in_kernel: got Tensor"):
        call({}, use_qk_l2norm_in_kernel=ends)
    with pytest.raises(ValueError, match="scale"):
        call({}, scale=float("nan"))
    assert chunk_gated_delta_rule(**dict(x, v=x["v"].clone().requires_grad_()), **ask)[0].requires_grad
    for odd in (None, "q", torch.empty(1, 40, 2, 16, device="meta", dtype=torch.float16), torch.eye(4).to_sparse()):
        with pytest.raises(ValueError, match="k"):
            call(dict(k=odd))


def test_tables_of_chunks_are_looked_at_and_change_nothing(started):
    said = FORMS["packed, with states"](tensors())
    tables = dict(chunk_indices=torch.tensor([[0, 0], [1, 0], [1, 1]]), chunk_offsets=torch.tensor([0, 1, 3]))
    ask = dict(target="tilelang", chunk_size=16, schedule="walk")
    want = chunk_gated_delta_rule(**said, **ask)
    started.clear()
    for _ in range(2):
        got = chunk_gated_delta_rule(**said, **tables, **ask)
        assert started[-1][1] == "chain" and all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
        started.clear()
    for wrong in (dict(chunk_offsets=torch.tensor([0, 2, 3])), dict(chunk_indices=torch.zeros(3))):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            chunk_gated_delta_rule(**said, **dict(tables, **wrong), **ask)
    assert not started


# --- the compiled text itself -----------------------------------------------------------------------------------------
ASKED = Asked(("walk", 16, True, None), False, True, (), 0.5, lambda t: None)


def chain(arguments, slots, launches, asked=ASKED, options=ASKED.options, **more):
    """A launcher of such arguments, as a function of tensors and a scale: whether it took them."""
    run = launcher(NONE, asked, arguments, slots, launches, **dict(dict(results=()), **more))
    return lambda *t, scale=None: run(t, options, scale, asked.decode) is not None


def spied(*slots, launches=1, **more):
    """A chain of kernels that note what they get, on a tensor [4, 6] and nothing."""
    seen = []
    kernel = lent()(lambda *args: seen.append([torch.from_dlpack(x).clone() if hasattr(x, "shape") else x for x in args]))
    runs = [row(_as_data(kernel, (7, n), len(slots) - 1, 1), range(len(slots))) for n in range(launches)]
    return chain([torch.zeros(4, 6), None], slots, runs, **more), seen


def test_kernels_get_dense_tensors_numbers_and_workspaces_of_their_own():
    x = torch.arange(24.0).view(4, 6)
    slots = [(ARGUMENT, 0, (4, 6)), (ARGUMENT, 0, (24,)), (FIXED, torch.full((3,), 5.0)),
             (WORKSPACE, torch.empty(1).expand(33, 7)), (WORKSPACE, torch.empty(5, dtype=torch.float16))]
    run, seen = spied(*slots, launches=2)
    assert run(x, None, scale=0.25) and run(x, None) and len(seen) == 4
    for n, (a, flat, fixed, w, h, seven, which, number) in enumerate(seen):
        assert torch.equal(a, x) and torch.equal(flat, x.view(-1)) and fixed.tolist() == [5, 5, 5]
        assert w.shape == (33, 7) and w.dtype == torch.float32 and h.shape == (5,) and h.dtype == torch.float16
        assert (seven, which, number) == (7, n % 2, (0.25, 0.5)[n // 2])


def test_workspaces_lie_apart():
    places = []
    kernel = lent()(lambda *args: places.append([torch.from_dlpack(x) for x in args]))
    like = [torch.empty(1).expand(3, n) for n in (5, 64, 1)]
    run = chain([torch.zeros(4)], [(WORKSPACE, x) for x in like], [row(_as_data(kernel, (), 2, 0), range(3))])
    assert run(torch.zeros(4))
    spans = sorted((x.data_ptr(), x.data_ptr() + 4 * x.numel()) for x in places[0])
    assert all((a - spans[0][0]) % 256 == 0 for a, _ in spans) and all(end <= start for (_, end), (start, _) in pairwise(spans))


class Mine(torch.Tensor):
    pass


ODD = {
    "shape": lambda: torch.zeros(4, 7), "rank": lambda: torch.zeros(24), "dtype": lambda: torch.zeros(4, 6, dtype=torch.float64),
    "strides": lambda: torch.zeros(6, 4).T, "steps": lambda: torch.zeros(8, 6)[::2], "int": lambda: torch.zeros(4, 6).int(),
    "place": lambda: torch.zeros(25)[1:].view(4, 6), "None": lambda: None, "str": lambda: "x", "number": lambda: 3,
    "negative": lambda: torch._neg_view(torch.zeros(4, 6)), "class": lambda: torch.zeros(4, 6).as_subclass(Mine),
    "sparse": lambda: torch.zeros(4, 6).to_sparse(), "meta": lambda: torch.zeros(4, 6, device="meta"),
    "nested": lambda: torch.nested.nested_tensor([torch.zeros(6)] * 4), "gradient": lambda: torch.zeros(4, 6, requires_grad=True),
    "freed": lambda: (x := torch.zeros(4, 6), x.untyped_storage().resize_(0))[0]}


@pytest.mark.parametrize("name", ODD)
def test_arguments_of_another_kind_start_nothing(name):
    run, seen = spied((ARGUMENT, 0, (4, 6)))
    assert run(torch.ones(4, 6), None) and run(torch.nn.Parameter(torch.ones(4, 6), False), None) and len(seen) == 2
    assert not run(ODD[name](), None)
    assert not run(torch.ones(4, 6), torch.ones(1)) and not run(torch.ones(4, 6))
    assert len(seen) == 2


def test_a_tensor_that_only_could_want_a_gradient_is_taken():
    run, seen = spied((ARGUMENT, 0, (4, 6)))
    with torch.no_grad():
        assert run(ODD["gradient"](), None)
    with torch.inference_mode():
        assert run(torch.ones(4, 6), None) and len(seen) == 2


@pytest.mark.parametrize("changed, scale, decode", [
    (("walk", 16, 1, None), None, False), (("walk", 16.0, True, None), None, False), (("fused", 16, True, None), None, False),
    (("walk", 16, True), None, False), (("walk", 16, True, torch.ones(2)), None, False), ([], None, False),
    (ASKED.options, 1, False), (ASKED.options, float("nan"), False), (ASKED.options, 1e39, False), (ASKED.options, "1", False),
    (ASKED.options, None, True)])
def test_other_options_start_nothing(changed, scale, decode):
    kernel = lent()(lambda *args: pytest.fail("started"))
    run = launcher(NONE, ASKED, [torch.zeros(4)], [(ARGUMENT, 0, (4,))], [row(_as_data(kernel, (), 0, 0), (0,))], ())
    assert run((torch.zeros(4),), changed, scale, decode) is None
    assert run((torch.zeros(4),), ASKED.options) is None


def test_equal_words_are_the_same_options():
    run, seen = spied((ARGUMENT, 0, (4, 6)), options=("".join(["wa", "lk"]), 16, True, None))
    assert run(torch.ones(4, 6), None) and len(seen) == 1


def test_modes_and_transforms_take_the_other_way():
    from torch.autograd import forward_ad
    from torch.utils._python_dispatch import TorchDispatchMode
    run, seen = spied((ARGUMENT, 0, (4, 6)))
    x = torch.ones(4, 6)
    with TorchDispatchMode():
        assert not run(x, None)
    with forward_ad.dual_level():
        assert run(x, None) and not run(forward_ad.make_dual(x, x), None)
    torch.func.vmap(lambda y: (pytest.fail("taken") if run(y, None) or run(x, None) else y))(torch.ones(2, 4, 6))
    assert len(seen) == 1


def test_what_is_written_is_apart_from_what_is_read():
    whole = torch.zeros(64)
    kernel = lent()(lambda *args: None)
    run = chain([whole[:16], whole[16:32]], [(ARGUMENT, 0, (16,))], [row(_as_data(kernel, (), 0, 0), (0,))],
                ASKED._replace(written=(1,)))
    assert run(whole[:16], whole[16:32]) and run(whole[32:48], whole[16:32])
    assert not run(whole[:16], whole[12:28]) and not run(whole[16:32], whole[16:32]) and not run(whole[28:44], whole[16:32])


def test_for_tests_numbers_start_as_nan_and_integers_as_minus_one():
    """An integer, such as a counter, cannot be NaN."""
    like = [torch.empty(2), torch.empty(1, dtype=torch.int32)]
    run = launcher(NONE, ASKED, [torch.zeros(4)], [(ARGUMENT, 0, (4,))], [], (1, 2), like, True)
    x, n = run((torch.zeros(4),), ASKED.options, None, False)
    assert x.isnan().all() and n.tolist() == [-1]


def test_results_are_new_or_given_and_rows_are_made_once():
    seen, made = [], []
    kernel = lent()(lambda *args: [seen.append(torch.from_dlpack(x).data_ptr()) for x in args])
    x, like = torch.zeros(4), torch.empty(1, dtype=torch.float16).expand(2, 3)
    run = launcher(NONE, ASKED, [x, None], [(ARGUMENT, 0, (4,)), (ARGUMENT, 2, (2, 3)), (ARGUMENT, 3, (5,))],
                   [row(_as_data(kernel, (), 2, 0), range(3))], (2, -1, 0), [like], True,
                   lambda: made.append(torch.zeros(5, dtype=torch.int32)) or made[-1])
    a, b = (run((x, None), ASKED.options, None, False) for _ in range(2))
    assert a[1] is None and a[2] is x and a[0].shape == (2, 3) and a[0].dtype == torch.float16 and a[0].isnan().all()
    assert len(made) == 1 and seen == [x.data_ptr(), a[0].data_ptr(), made[0].data_ptr(),
                                       x.data_ptr(), b[0].data_ptr(), made[0].data_ptr()] and a[0].data_ptr() != b[0].data_ptr()


def test_further_tensors_are_looked_at_first():
    seen = []

    def look(t):
        seen.append(t)
        raise ValueError("no such table")
    kernel = lent()(lambda *args: pytest.fail("started"))
    run = chain([torch.zeros(4)], [(ARGUMENT, 0, (4,))], [row(_as_data(kernel, (), 0, 0), (0,))], ASKED._replace(look=look))
    with pytest.raises(ValueError, match="no such table"):
        run(torch.zeros(4), None, "table")
    assert len(seen[0]) == 3


def test_a_kernel_that_fails_first_leaves_the_call_to_python_and_a_later_one_raises():
    def fails(*args):
        raise ValueError("the kernel says so")
    good, bad = (row(_as_data(lent()(f), (), 0, 0), (0,)) for f in (lambda *args: None, fails))
    assert not chain([torch.zeros(4)], [(ARGUMENT, 0, (4,))], [bad, good])(torch.zeros(4))
    with pytest.raises(RuntimeError, match="kernel 1 of the call did not start"):
        chain([torch.zeros(4)], [(ARGUMENT, 0, (4,))], [good, bad])(torch.zeros(4))


# --- where it comes from ----------------------------------------------------------------------------------------------
@pytest.fixture
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("GDN_CODEGEN_CACHE", str(tmp_path / "cache"))
    native_launcher._library.cache_clear()
    yield tmp_path
    native_launcher._library.cache_clear()


def made_of(ahead):
    return launcher(ahead, ASKED, [torch.zeros(4)], [(ARGUMENT, 0, (4,))], [], ())


def takes(run):
    return run((torch.zeros(4),), ASKED.options, None, False) == ()


def test_beside_kernels_compiled_ahead_it_is_loaded_and_never_compiled(empty_cache, monkeypatch):
    ahead = empty_cache / "ahead"
    ahead.mkdir()
    monkeypatch.setattr(native_launcher, "compile_to", lambda path: pytest.fail("compiled"))
    assert made_of(ahead) is None
    native_launcher._library.cache_clear()
    monkeypatch.undo()
    shutil.copy(KNOWN / native_launcher.file_name(), ahead)
    monkeypatch.setattr(native_launcher, "compile_to", lambda path: pytest.fail("compiled"))
    assert takes(made_of(ahead))


def test_no_call_waits_for_the_compiler(empty_cache, monkeypatch, started):
    """Calls go through Python until the library is there, and then no more."""
    known = (KNOWN / native_launcher.file_name()).read_bytes()
    go, x = threading.Event(), dict(tensors(), target="tilelang", chunk_size=16, schedule="walk")
    with monkeypatch.context() as here:
        here.setattr(native_launcher, "compile_to", lambda path: go.wait(60) and path.write_bytes(known))
        for _ in range(4):
            chunk_gated_delta_rule(**x)
        assert {how for _, how in started} == {"python"} and not native_launcher.ready(NONE)
        go.set()
        assert native_launcher.ready(NONE, wait=True)
    chunk_gated_delta_rule(**x)
    assert started[-1][1] == "chain"


@pytest.fixture
def no_compiler(empty_cache, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.delenv("CXX", raising=False)


def test_without_a_compiler_there_is_none(no_compiler):
    with pytest.warns(RuntimeWarning, match="slower way"):
        assert made_of(NONE) is None


def test_without_a_compiler_calls_go_the_other_way(no_compiler, started):
    with pytest.warns(RuntimeWarning, match="slower way"):
        for _ in range(2):
            chunk_gated_delta_rule(**tensors(), target="tilelang", chunk_size=16, schedule="walk")
    assert {how for _, how in started} == {"python"}


@pytest.mark.parametrize("name", ["k", "A_log"])
def test_a_sign_beside_the_memory_and_an_option_that_only_equals_are_seen(name, started):
    x = dict(FORMS["raw gates"](tensors()), target="tilelang", schedule="walk", chunk_size=16)
    for _ in range(3):
        chunk_gated_delta_rule(**x)
    assert started[-1][1] == "chain"
    before = len(started)
    with pytest.raises(ValueError, match=f"{name}: got a view with torch's negative bit"):
        chunk_gated_delta_rule(**{**x, name: torch._neg_view(x[name])})
    with pytest.raises(ValueError, match=r"chunk_size: got 16\.0"):
        chunk_gated_delta_rule(**{**x, "chunk_size": 16.0})
    assert len(started) == before
