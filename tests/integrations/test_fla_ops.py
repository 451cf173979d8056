"""FLA's functions with its plug-in: what is served, what is left to FLA, and how it is switched off."""
import importlib
import inspect
import sys
import types
from unittest import mock

import pytest
import torch

pytest.importorskip("fla.layers", reason="needs flash-linear-attention")
import fla
import fla_on_cpu as host

from gdn_codegen import integrations
from gdn_codegen.integrations import fla as plug
from gdn_codegen.runtime.call import gradient, gradient_builds

REGISTERED = fla.__version__ == "0.6.0"
plug.disable()  # for other tests of this process


@pytest.fixture(scope="module", autouse=True)
def enabled():
    plug.enable()
    yield
    plug.disable()


@pytest.fixture(autouse=True)
def nothing_recorded():
    integrations.reset()
    yield
    if not plug.enabled():
        plug.enable()


def op(name):
    """FLA's function, as its package has it now."""
    return getattr(importlib.import_module(f"fla.ops.{plug.ENTRIES[name].where}"), name)


def inputs(name, T=70, H=2, HV=2, K=32, V=32, B=1, seed=0):
    """The tensors that FLA's function of this name needs. Keys of tokens 5 to 40 are equal."""
    gen = torch.Generator().manual_seed(seed)
    r, u = lambda *s: torch.randn(*s, generator=gen), lambda *s: torch.rand(*s, generator=gen)
    k = torch.nn.functional.normalize(r(B, T, H, K), dim=-1)
    k[:, 5:40] = k[:, 5:6]
    x = dict(q=r(B, T, H, K), k=k, v=r(B, T, HV, V), g=-u(B, T, HV), beta=u(B, T, HV))
    wide = -u(B, T, HV, K)
    if name.endswith(("kda", "gla", "gdn2")) and "simple" not in name:
        x["g"] = wide
    if name.endswith("gdn2"):
        x.update(b=u(B, T, HV, K), w=u(B, T, HV, V))
    if name.endswith(("dplr_delta_rule", "rwkv7")):
        x.update(a=-k, b=k * u(B, T, H, 1), gk=wide, r=x["q"], w=wide, kk=k)
        x["a"] = u(B, T, H, K) if "mul" in name else x["a"]
    if name == "fused_recurrent_gla":
        x["gk"] = wide
    if name.endswith("product"):
        x.update({n: torch.cat([x[n], x[n].flip(1)], 1) for n in ("k", "v", "beta")}, num_householder=2)
    names = inspect.signature(inspect.unwrap(op(name))).parameters
    needed = {n for n, p in names.items() if p.default is p.empty} | {"g", "gk", "beta"}
    return {n: y for n, y in x.items() if n in names and n in needed}


@pytest.mark.parametrize("name", plug.ENTRIES)
def test_results_are_as_fla_has_them(name):
    """By position and by keyword; shapes and dtypes by fake tensors, without a kernel."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    x = inputs(name, T=5)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        x = {n: mode.from_tensor(y.bfloat16()) if isinstance(y, torch.Tensor) else y for n, y in x.items()}
        turned = "state_v_first" in inspect.signature(inspect.unwrap(op(name))).parameters
        o, final = op(name)(**x, output_final_state=True, **({"state_v_first": True} if turned else {}))
        tokens, width = 5, x["v"].shape[-1]
        assert (o.shape, o.dtype) == ((1, tokens, 2, width), torch.bfloat16)
        assert (final.shape, final.dtype) == ((1, 2, 32, 32), torch.float32)
        assert op(name)(**x, output_final_state=False)[1] is None
        order = [n for n in inspect.signature(inspect.unwrap(op(name))).parameters if n not in ("args", "kwargs")]
        upto = order.index("scale")
        o, final = op(name)(*(x.get(n) for n in order[:upto]), 0.5, None, True)
        assert o.shape == (1, tokens, 2, width) and final.dtype == torch.float32
    assert integrations.report("fla").splitlines() == [f"fla: {name}: served: 3"]


@pytest.mark.parametrize("name", plug.ENTRIES)
def test_defaults_are_those_of_fla(name):
    ours = inspect.signature(plug.ENTRIES[name].ours).parameters
    for n, p in inspect.signature(inspect.unwrap(op(name))).parameters.items():
        if n in ours and p.default is not p.empty and not (n == "scale" and name == "fused_mul_recurrent_rwkv7"):
            assert ours[n].default == p.default, n


RAW = dict(use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True, state_v_first=True,
           A_log=torch.tensor([0.1, -0.3, 0.2, 0.4]), dt_bias=torch.tensor([0.1, 0.2, -0.3, 0.4]))
NUMBERS = [
    pytest.param("chunk_gated_delta_rule", dict(RAW, allow_neg_eigval=True), marks=pytest.mark.long),
    pytest.param("fused_recurrent_gated_delta_rule", RAW, marks=pytest.mark.long),
    pytest.param("chunk_gated_delta_rule", {}, marks=pytest.mark.slow),
    pytest.param("chunk_kda", dict(use_qk_l2norm_in_kernel=True, safe_gate=True), marks=pytest.mark.long),
    pytest.param("fused_recurrent_kda", {}, marks=pytest.mark.long),
    pytest.param("chunk_gdn2", {}, marks=pytest.mark.long)]


@pytest.mark.parametrize("name, said", NUMBERS)
def test_packed_sequences_agree_with_flas_reference(name, said):
    """Two calls, the second from the first's states; a sequence has no token, and another one."""
    HV = 2 if name.endswith("gdn2") else 4
    ends = torch.tensor([0, 33, 33, 69, 70])
    states, want = None, None
    member = name.removeprefix("chunk_").removeprefix("fused_recurrent_")
    for call in range(2):
        x = inputs(name, HV=HV, seed=call)
        o, states = op(name)(**x, **said, initial_state=states, output_final_state=True, cu_seqlens=ends)
        with host.in_float64():
            wide = {n: y.double() if isinstance(y, torch.Tensor) else y for n, y in {**x, **said}.items()}
            o64, want = host.reference(member)(**wide, initial_state=want, output_final_state=True, cu_seqlens=ends)
        assert host.error(o, o64) < 1e-5 and host.error(states, want) < 1e-5
    assert integrations.report("fla").splitlines() == [f"fla: {name}: served: 2"]


# --- left to FLA ------------------------------------------------------------------------------------------------------------
def left(function):
    return [line.split(": ", 2)[2] for line in integrations.report("fla").splitlines() if line.startswith(f"fla: {function}: ")]


@pytest.mark.parametrize("change, why", [
    ({"cp_context": types.SimpleNamespace(cu_seqlens=torch.tensor([0, 70]), cu_seqlens_cpu=None)}, "cp_context: got"),
    ({"v": torch.zeros(1, 70, 2, 32, dtype=torch.float16)}, "q, k, v: got torch.float32, torch.float32, torch.float16"),
    ({"out": torch.zeros(1, 70, 2, 32)}, "arguments: got 0 by position and q, k, v, g, beta, out; accepted"),
    ({"K": 512}, "head_dim_k: got 512")])
def test_calls_that_are_left_to_fla(change, why):
    """FLA's function gets the call, as it came: here, what it would give to autograd."""
    from fla.ops.gated_delta_rule import chunk
    x = inputs("chunk_gated_delta_rule", K=change.pop("K", 32))
    with mock.patch.object(chunk, "ChunkGatedDeltaRuleFunction") as theirs:
        theirs.apply.return_value = "o", "state"
        assert op("chunk_gated_delta_rule")(**{**x, **change}) == ("o", "state")
        assert op("chunk_gated_delta_rule")(**{**x, **change}) == ("o", "state")
    assert theirs.apply.call_args.args[0] is x["q"] and theirs.apply.call_count == 2
    (line,) = left("chunk_gated_delta_rule")
    assert line.startswith(f"left to the host ({why}") and line.endswith(": 2")


@pytest.mark.skipif(not REGISTERED, reason="FLA has another registry")
def test_what_only_the_call_refuses_goes_on_to_other_backends(monkeypatch):
    from fla.backends import BaseBackend, register
    from fla.ops.kda.chunk import chunk_kda

    class Other(BaseBackend):
        backend_type = "other"
        on = True

        def is_enabled(self):
            return self.on

        def chunk_kda(self, *args, **kwargs):
            return args, kwargs

    register(chunk_kda)(Other)
    monkeypatch.setattr(plug, "refusal", lambda *args, **kwargs: "")
    x = inputs("chunk_kda", K=512)
    args, kwargs = op("chunk_kda")(x["q"], **{n: y for n, y in x.items() if n != "q"}, scale=0.5)
    Other.on = False  # FLA has no way to take a backend out
    assert args[0] is x["q"] and kwargs["v"] is x["v"] and kwargs["scale"] == 0.5
    (line,) = left("chunk_kda")
    assert line.startswith("left to the host (head_dim_k: got 512") and line.endswith(": 1")


def test_replaced_functions_fall_back_too():
    from fla.ops.gla import chunk, fused_recurrent
    x = inputs("chunk_gla", K=512)
    with mock.patch.object(chunk, "ChunkGLAFunction") as theirs:
        theirs.apply.return_value = "o", "state"
        assert op("chunk_gla")(*x.values(), scale=0.5) == ("o", "state")
    assert list(theirs.apply.call_args.args[:4]) == list(x.values()) and theirs.apply.call_args.args[4] == 0.5
    with mock.patch.object(fused_recurrent, "fused_recurrent", return_value=("o", "state")) as theirs:
        x = inputs("fused_recurrent_gla")
        assert op("fused_recurrent_gla")(**x, reverse=True) == ("o", "state")
        assert op("fused_recurrent_gla")(**x, gv=x["v"]) == ("o", "state")
        assert op("fused_recurrent_gla")(**x, a_word_that_fla_ignores=True) == ("o", "state")
    assert [line.split(":")[0] for line in left("fused_recurrent_gla")] == [
        "left to the host (reverse", "left to the host (gv", "left to the host (arguments"]


@pytest.mark.parametrize("name, member", [("chunk_gla", "gla"), ("chunk_gated_delta_rule", "gated_delta_rule")])
def test_a_gradient_without_a_build_is_flas(name, member, monkeypatch):
    """Of a function that is replaced, and of one that FLA dispatches. FLA's kernels are its reference here."""
    module = importlib.import_module(f"fla.ops.{member}.chunk")
    functions = {"gla": "ChunkGLAFunction", "gated_delta_rule": "ChunkGatedDeltaRuleFunction"}
    x = inputs(name, T=9)
    theirs = lambda *_: host.NAIVE[member](**x, h=None)
    monkeypatch.setattr(gradient_builds, "unfit", lambda b: "too large")
    monkeypatch.setattr(gradient_builds, "_fitting", gradient_builds._fitting.__wrapped__)  # keeps nothing
    monkeypatch.setattr(gradient, "_built", set())
    for y in x.values():
        y.requires_grad_()
    with mock.patch.object(module, functions[member]) as autograd:
        autograd.apply.side_effect = theirs
        op(name)(**x)[0].square().sum().backward()
    got = {n: y.grad for n, y in x.items()}
    x = {n: y.detach().requires_grad_() for n, y in x.items()}
    theirs()[0].square().sum().backward()
    assert all(torch.equal(got[n], y.grad) for n, y in x.items()) and autograd.apply.call_count == 1
    (line,) = left(name)
    assert line.startswith("left to the host (target: got 'auto'; accepted: a target that has a gradient of")
    assert "(too large)" in line


@pytest.mark.parametrize("name, said, error", [
    ("chunk_gated_delta_rule", {"head_first": False}, DeprecationWarning),
    ("chunk_kda", {"chunk_size": 16}, ValueError), ("chunk_gdn2", {"chunk_size": 32}, ValueError),
    ("chunk_gla", {"head_first": True}, TypeError), ("chunk_gla", {"q": None}, TypeError),
    ("chunk_gated_delta_rule", {"allow_neg_eigval": True}, ValueError),
    ("fused_recurrent_kda", {"transpose_state_layout": True, "state_v_first": True}, ValueError)])
def test_errors_are_those_of_fla(name, said, error):
    x = list(inputs(name).values()) if "q" in said else []  # then q comes twice
    with pytest.raises(error) as ours:
        op(name)(*x, **({} if x else inputs(name)), **said)
    plug.disable()
    with pytest.raises(error) as theirs:
        op(name)(*x, **({} if x else inputs(name)), **said)
    assert str(ours.value) == str(theirs.value)


def test_the_older_name_of_state_v_first_warns():
    from torch._subclasses.fake_tensor import FakeTensorMode
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, pytest.warns(DeprecationWarning, match="state_v_first"):
        x = {n: mode.from_tensor(y) for n, y in inputs("fused_recurrent_kda", T=3, V=64).items()}
        assert op("fused_recurrent_kda")(**x, output_final_state=True, transpose_state_layout=True)[1].shape == (1, 2, 64, 32)


# --- off and on -------------------------------------------------------------------------------------------------------------
def test_names_of_loaded_modules_are_replaced_and_given_back():
    mine = types.ModuleType("mine_of_fla")
    sys.modules["mine_of_fla"] = mine
    try:
        exec("from fla.ops.gla import chunk_gla as prompt", vars(mine))
        ours = mine.prompt
        assert ours is op("chunk_gla") and "served" not in integrations.report()
        plug.disable()
        theirs = mine.prompt
        assert theirs is op("chunk_gla") and theirs is not ours and inspect.unwrap(ours) is inspect.unwrap(theirs)
        assert not plug.enabled()
        exec("from fla.ops.gla import fused_recurrent_gla", vars(mine))
        plug.enable()
        assert mine.prompt is ours and mine.fused_recurrent_gla is op("fused_recurrent_gla") and plug.enabled()
        layers = sys.modules.get("fla.layers.gla")
        assert layers is None or layers.chunk_gla is ours
    finally:
        del sys.modules["mine_of_fla"]


def test_what_another_plug_in_keeps_calls_fla_once_this_one_is_off():
    ours = op("chunk_gla")  # Names of another plug-in keep it as the host's function
    with pytest.raises(Exception, match=r"arguments: got|chunk_gla\(\) got"):
        ours(1, 2, 3, no_such_word=4)
    assert "chunk_gla: left to the host" in integrations.report()
    integrations.reset()
    plug.disable()
    with pytest.raises(TypeError):
        ours(1, 2, 3, no_such_word=4)
    assert integrations.report() == ""


@pytest.mark.skipif(not REGISTERED, reason="FLA has another registry")
def test_what_fla_dispatches_is_registered_and_not_replaced():
    from fla.backends import _function_registries, _operation_registries
    for name, operation in plug.DISPATCHED.items():
        registry = _operation_registries[operation] if operation else _function_registries[inspect.unwrap(op(name))]
        first = [b.backend_type for b in registry._get_sorted_backends()]
        at = first.index("gdn_codegen")
        assert name not in plug._replaced and not {"flash_qla", "flash_kda"} & set(first[:at])
        assert registry._backends["gdn_codegen"].is_enabled()
        plug.disable()
        assert not registry._backends["gdn_codegen"].is_enabled()
        plug.enable()


def test_functions_that_fla_keeps_out_of_graphs_stay_out():
    marked = lambda: {n for n in plug.ENTRIES if getattr(op(n), "_torchdynamo_disable", False)}
    ours = marked()
    plug.disable()
    assert ours == marked() and "chunk_gla" in ours and "fused_recurrent_gla" not in ours


@pytest.mark.long
def test_steps_are_traced_by_torch_compile():
    x, recurrent = inputs("fused_recurrent_gated_delta_rule", T=2), op("fused_recurrent_gated_delta_rule")
    want = recurrent(**x)[0]

    @torch.compile(fullgraph=True, backend="eager")
    def step(**x):
        return recurrent(**x)[0] * 2
    assert torch.equal(step(**x), want * 2)


def test_other_versions_are_refused(monkeypatch):
    monkeypatch.setattr(fla, "__version__", "0.4.2")
    with pytest.raises(ImportError, match=r"fla: got 0\.4\.2; accepted: fla-core of version 0\.5\.1"):
        plug._found()
    monkeypatch.setitem(sys.modules, "fla", None)
    with pytest.raises(ImportError, match="fla: got none; accepted: fla-core"):
        plug._found()
