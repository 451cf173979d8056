"""`bench --algorithm`: pages other than Gated DeltaNet, beside FLA's and mamba-ssm's ops of the same name, for which stand-ins
compute exactly what they are given."""
import json
import sys
from dataclasses import replace
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest
import recurrences
import torch
from reference import rms_error

from gdn_codegen.algorithms import find, names
from gdn_codegen.cli import main
from gdn_codegen.ir.builder import algorithm, carried, cumsum, exp, last, lower
from gdn_codegen.runtime.build import lowered
from gdn_codegen.runtime.roofline import Ceilings
from gdn_codegen.tools import bench_calls, bench_errors, bench_gpu
from gdn_codegen.tools.peer_ops import LIBRARIES, OPS, peers_of, rivals
from gdn_codegen.tools.peers import Absent, Refused
from gdn_codegen.tools.problems import errors, problem, reference
from gdn_codegen.tools.shapes import Shape
from gdn_codegen.tools.verify import TOLERANCE

pytestmark = pytest.mark.slow

ONE, GROUPS, RAGGED = Shape("one", (70,), 2, 2), Shape("groups", (70,), 1, 2), Shape("ragged", (40, 9), 2, 2)
SMALL = ["--head-dim-k", "64", "--head-dim-v", "64", "--tokens", "40", "--heads", "1"]


def by_token(page, x):
    """o [T, HV, V] and the final states, by the recurrences of tests/family."""
    of = {**{n: getattr(recurrences, n) for n in names()}, "gated_delta_product": lambda S, q, g, scale, **y: (
        recurrences.gated_delta_product(S, q, [y["k1"], y["k2"]], [y["v1"], y["v2"]], g, [y["beta1"], y["beta2"]], scale))}[page]
    K, V = x.dims
    o, states = torch.zeros(sum(x.lengths), x.heads[1], V).double(), torch.zeros(len(x.lengths), x.heads[1], K, V).double()
    start = 0
    for n, length in enumerate(x.lengths):
        for h in range(x.heads[1]):
            for t in range(start, start + length):
                given = {i: (y[0, t, h * y.shape[2] // x.heads[1]] if y.ndim > 2 else y[h]).double() for i, y in x.inputs.items()}
                o[t, h], states[n, h] = of(states[n, h], **given, **x.numbers)
        start += length
    return o, states


@pytest.mark.parametrize("gates", ["layer", "uniform", "mixed", "-50"])
@pytest.mark.parametrize("page", names())
def test_inputs_and_the_reference_of_each_page(page, gates):
    """What is drawn keeps the state in bounds, and chunks in float64 are the recurrence."""
    s = Shape("two", (70, 30), 2, 4)
    x = problem(s, "bfloat16", 16, 16, gates, device="cpu", algorithm=page)
    assert list(x.inputs) == list(find(page).inputs)
    o, states = by_token(page, x)
    want = reference(x, (0, 2, 3))
    assert rms_error(want.outputs[0], o[:, [0, 2, 3]]) < 1e-12 and rms_error(want.states[0], states[:, [0, 2, 3]]) < 1e-12
    assert 1e-3 < o.abs().max() < 100 and states.abs().max() < 100


@pytest.mark.parametrize("page", names())
def test_the_reference_runs_where_the_tensors_are(page):
    """The meta device, which mixes with no other, stands for a GPU. On the CPU the reference runs before and after."""
    x = problem(Shape("one", (70,), 1, 2), "bfloat16", 16, 16, device="cpu", algorithm=page)
    there = replace(x, inputs={n: t.to("meta") for n, t in x.inputs.items()}, ends=x.ends.to("meta"))
    before = reference(x).outputs[0]
    assert reference(there).outputs[0].is_meta and torch.equal(reference(x).outputs[0], before)


# --- peers -----------------------------------------------------------------------------------------------------------
def exact(page, **given):
    """What a stand-in of a library's op returns: the page's results for the arguments, which say the inputs in its own words."""
    ends = given.pop("cu_seqlens", None)
    first = next(iter(given.values()))
    lengths = tuple(ends.diff().tolist()) if ends is not None else (first.shape[1],)
    inputs = {n: given[n] for n in page.inputs}
    rows = [t for t in inputs.values() if t.ndim == 4]
    K, V = rows[0].shape[3], inputs.get("v", inputs.get("v1")).shape[3]
    heads = rows[0].shape[2], max(t.shape[2] for t in rows)
    x = bench_gpu.Problem(page, inputs, torch.tensor([0, *lengths]).cumsum(0), lengths, heads, (K, V), rows[0].dtype)
    ref = reference(x, range(heads[1]))
    return ref.outputs[0][None], ref.states[0]


def stand_in(name):
    """The library's op of a page, with its own names, orders and layouts."""
    page = find(name)

    def fla(*, scale, output_final_state, g_gamma=None, num_householder=0, **given):
        assert output_final_state
        if g_gamma is not None:
            given["g"] = g_gamma
        for n in ("k", "v", "beta") if num_householder else ():
            y = given.pop(n)
            given |= {f"{n}{i + 1}": y[:, i::2] for i in range(2)}
        assert scale == page.scalar_defaults({"K": 64, "V": 64})["scale"]
        return exact(page, **given)

    def mamba(x, dt, A, B, C, chunk_size, D, return_final_states):
        assert chunk_size and return_final_states
        o, state = exact(page, q=C, k=B, v=x, dt=dt, A=A, D=D)
        return o, state.mT
    return mamba if name == "mamba2" else fla


@pytest.fixture
def libraries(monkeypatch):
    """Modules of the libraries that hold stand-ins for all their ops, also those that another test has imported."""
    def module(path):
        for i in range(len(path.split("."))):
            full = ".".join(path.split(".")[:i + 1])
            if sys.modules.get(full) is None:
                m = ModuleType(full)
                m.__spec__, m.__path__ = ModuleSpec(full, None), []
                monkeypatch.setitem(sys.modules, full, m)
        return sys.modules[path]

    def hold(page):
        monkeypatch.setattr(module(OPS[page].module), OPS[page].name, stand_in(page), raising=False)
    hold.module = module
    return hold


@pytest.mark.parametrize("shape", [ONE, GROUPS, RAGGED], ids=lambda s: s.name)
@pytest.mark.parametrize("page", names())
def test_each_op_is_fed_what_it_takes(page, shape, libraries):
    libraries(page)
    x, peer = problem(shape, "bfloat16", 64, 64, device="cpu", algorithm=page), peers_of(find(page))[OPS[page].peer]
    refused = {"groups": not OPS[page].groups, "ragged": page == "mamba2", "one": False}[shape.name]
    if refused:
        with pytest.raises(Refused, match=r"heads: got 1/2|sequences: got 2"):
            peer.prepare(x)
        return
    error_o, error_state = errors(peer.prepare(x)(), reference(x))
    assert error_o < 1e-12 and error_state < 1e-12


@pytest.mark.parametrize("shape", [ONE, GROUPS, RAGGED], ids=lambda s: s.name)
def test_cudnn_is_fed_what_it_takes(shape, libraries, monkeypatch):
    """Tokens of all sequences in one dim, ends in int32, and states [N, HV, V, K]."""
    def cudnn(q, k, v, g, beta, cu_seqlens, scale, output_final_state):
        assert output_final_state and scale == 128 ** -0.5 and cu_seqlens.dtype == torch.int32
        rows = {n: t[None] for n, t in dict(q=q, k=k, v=v, g=g, beta=beta).items()}
        o, state = exact(find("kimi_delta_attention"), **rows, cu_seqlens=cu_seqlens)
        return o[0], state.mT
    monkeypatch.setattr(libraries.module("cudnn.linear_attention.ops"), "kimi_delta_attention", cudnn, raising=False)
    x = problem(shape, "bfloat16", 128, 128, device="cpu", algorithm="kimi_delta_attention")
    error_o, error_state = errors(peers_of(find("kimi_delta_attention"))["cudnn"].prepare(x)(), reference(x))
    assert error_o < 1e-12 and error_state < 1e-12


def test_cudnn_takes_no_beta_above_one(libraries, monkeypatch):
    """Its check of the gates cuts sequences as if beta were 1 at most."""
    monkeypatch.setattr(libraries.module("cudnn.linear_attention.ops"), "kimi_delta_attention", None, raising=False)
    x = problem(ONE, "bfloat16", 128, 128, "alike", device="cpu", algorithm="kimi_delta_attention")
    with pytest.raises(Refused, match="beta: got above 1; cudnn accepts up to 1"):
        peers_of(find("kimi_delta_attention"))["cudnn"].prepare(x)


def test_a_tensor_of_another_dtype_is_refused(libraries):
    libraries("gla")
    x = problem(ONE, "bfloat16", 64, 64, device="cpu", algorithm="gla")
    x.inputs["g"] = x.inputs["g"].bfloat16()
    with pytest.raises(Refused, match=r"fla: g: got bfloat16 \[1, 70, 2, 64\]; it takes contiguous float32"):
        peers_of(find("gla"))["fla"].prepare(x)


def test_a_library_that_does_not_import_is_absent(libraries, monkeypatch):
    """mamba-ssm without its CUDA build: the row says which parts of it are enough."""
    monkeypatch.setitem(sys.modules, "mamba_ssm", None)
    with pytest.raises(Absent, match=r"mamba_ssm is absent: .* mamba_ssm/ops/triton and mamba_ssm/utils alone"):
        peers_of(find("mamba2"))["mamba_ssm"].prepare(problem(ONE, "bfloat16", 64, 64, device="cpu", algorithm="mamba2"))


def test_names_of_peers():
    assert [p.name for p in rivals("all", find("rwkv7"))] == ["fla"] and LIBRARIES[:2] == ("fla", "mamba_ssm")
    assert [p.name for p in rivals("all", find("mamba2"))] == ["mamba_ssm"] and rivals("all", mine) == []
    assert [p.name for p in rivals("all", find("kimi_delta_attention"))] == ["fla", "cudnn"] and "cudnn" in LIBRARIES
    with pytest.raises(ValueError, match="peers: got 'fla' for mamba2; accepted: all, none, mamba_ssm"):
        rivals("fla", find("mamba2"))


# --- the command -----------------------------------------------------------------------------------------------------
@pytest.fixture
def gpu(monkeypatch, no_peers):
    """The CPU in a GPU's place, with recorded times."""
    monkeypatch.setattr(bench_gpu, "problem", lambda *a, **o: problem(*a, **o, device="cpu"))
    monkeypatch.setattr(bench_errors, "problem", lambda *a: problem(*a[:6], "cpu", *a[7:]))
    for m in (bench_gpu, bench_errors):
        monkeypatch.setattr(m, "compile_first", lambda *a: None)
    monkeypatch.setattr(bench_gpu, "ceilings", lambda: Ceilings(4.3e12, 790e12))
    monkeypatch.setattr(bench_gpu, "device_time", lambda run, n: (0.3, {"o_S_kernel": 0.2}))
    for f in ("wall_time", "host_time", "graph_time"):
        monkeypatch.setattr(bench_gpu, f, lambda run, n: 0.3)
    for n, f in dict(is_available=lambda: True, synchronize=lambda: None, empty_cache=lambda: None,
                     get_device_name=lambda: "a GPU").items():
        monkeypatch.setattr(torch.cuda, n, f)


def rows(words, file):
    assert main([*words, "--json", str(file)]) == 0
    return json.loads(file.read_text())["rows"]


@pytest.mark.slow
@pytest.mark.parametrize("page", sorted(OPS.keys() - {"gated_delta_rule"}))
def test_the_op_beside_the_library(page, gpu, libraries, tmp_path):
    """The package's op and the library's are called on the same tensors, and errors stand beside errors."""
    libraries(page)
    words = ["bench", "--target", "triton", "--algorithm", page, "--dtype", "bfloat16", "--schedule", "auto", *SMALL,
             "--peers", OPS[page].peer]
    theirs, mine = rows(words, tmp_path / "t.json")
    assert (theirs["who"], theirs["note"], mine["who"]) == (OPS[page].peer, OPS[page].name, "triton auto")
    assert theirs["error_o"] < 1e-12 < mine["error_o"] < TOLERANCE["bfloat16"] and mine["error_state"] < TOLERANCE["bfloat16"]
    assert mine["note"].startswith("gdn" if page == "gated_delta_product" else page)
    theirs, mine = rows([*words, "--errors", "1"], tmp_path / "e.json")
    assert theirs["error_state"]["max"] < 1e-12 < mine["error_state"]["mean"] <= mine["error_state"]["max"]


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["bthd", "bhtd"])
def test_named_schedules_of_a_page_with_gates_of_channels(layout, gpu, tmp_path):
    words = ["bench", "--target", "triton", "--algorithm", "kimi_delta_attention", "--schedule", "staged", "--layout", layout,
             "--head-dim-k", "32", "--head-dim-v", "16", "--chunk", "16", "--tokens", "40", "--heads", "1/2"]
    *theirs, row = rows(words, tmp_path / "t.json")
    assert [x["who"] for x in theirs if "absent" in x] == ["fla", "cudnn"]
    assert row["who"] == "triton staged c16" and row["error_o"] < TOLERANCE["float16"]


@algorithm(q="C K", k="C K", v="C V", alpha="C", S=carried("K V"), Z=carried("K V"))
def mine(q, k, v, alpha, S, Z):
    """Two outputs of names of their own, and two states."""
    G = cumsum(alpha)
    D = exp(lower(G[:, None] - G[None, :], fill=-float("inf")))
    y = exp(G)[:, None] * (q @ S) + ((q @ k.T) * D) @ v
    z = q @ Z + lower(q @ k.T) @ v
    S = exp(last(G)) * S + k.T @ (exp(last(G) - G)[:, None] * v)
    Z = Z + k.T @ v
    return y, z, S, Z


@pytest.mark.slow
@pytest.mark.parametrize("way", [[], ["--errors", "1"], ["--errors", "1", "--interpret"]], ids=" ".join)
def test_a_page_of_ones_own(way, gpu, tmp_path):
    words = ["bench", "--target", "triton", "--algorithm", f"{__file__}:mine", "--schedule", "fused", "--chunk", "16",
             "--head-dim-k", "16", "--head-dim-v", "16", "--tokens", "40", "--heads", "1", *way]
    (row,) = rows(words, tmp_path / "t.json")
    assert row["who"] == "triton fused c16" and "error" not in row


def test_the_chosen_build_is_that_of_the_op():
    """Which has the chosen build of Gated DeltaNet on twice the tokens where a token takes two steps."""
    x = problem(ONE, "bfloat16", 64, 64, device="cpu", algorithm="gated_delta_product")
    b, _, _, steps = bench_calls.ours_of(bench_calls.Auto(OPS["gated_delta_product"], "triton"), x)
    assert (b.page.name, steps) == ("gated_delta_rule", 2)
    (found,) = [bench_gpu.our_costs(b, Shape("", (n,), 2, 2)) for n in (140,)]
    assert set(found) == {k.name for k in lowered(b).kernels}


@pytest.mark.slow
@pytest.mark.parametrize("page", ["gla", "mamba2", "rwkv7", f"{__file__}:mine"])
@pytest.mark.parametrize("layout", ["bthd", "bhtd"])
def test_simulated_cycles_of_pages_with_other_inputs(page, layout, capsys):
    """Gates of channels are float32, and numbers of heads have no tokens."""
    words = ["bench", "--target", "pto", "--algorithm", page, "--schedule", "staged", "--chunk", "16", "--head-dim-k", "16",
             "--head-dim-v", "16", "--tokens", "40", "--heads", "1/2", "--blocks", "1", "--layout", layout]
    if page.endswith("mine"):
        words[words.index("staged")] = "fused"
    assert main(words) == 0
    assert int(capsys.readouterr().out.splitlines()[-1].split()[1]) > 100
