"""Megatron-LM and torchtitan, by packages that have the names, signatures and calls of the real ones."""
import importlib
import sys

import packages
import pytest
import torch
from reference import expected, problem, recurrence, rms_error

from gdn_codegen import integrations

#: What stands in for FLA's functions, and for torch's: none may be called.
THEIRS = "def {0}(*args, **kwargs):\n    raise AssertionError('{0} of the host was called')\n"
MEGATRON = {
    "megatron/core/ssm/gated_delta_net/__init__.py": "",
    "megatron/core/ssm/gated_delta_net/common.py": THEIRS.format("chunk_gated_delta_rule"),
    "megatron/core/ssm/gated_delta_net/gdn.py": "from .common import chunk_gated_delta_rule\n"
        + THEIRS.format("torch_chunk_gated_delta_rule") + "fused_recurrent_gated_delta_rule = None\n",
    "megatron/core/ssm/gated_delta_net/gdn2.py": THEIRS.format("chunk_gdn2") + THEIRS.format("torch_chunk_gdn2"),
    "megatron/core/ssm/gated_delta_product.py": THEIRS.format("chunk_gated_delta_product")
        + THEIRS.format("fused_recurrent_gated_delta_rule_update")}
TORCHTITAN = {
    "torchtitan/models/qwen3_5/gdn.py": THEIRS.format("_fla_chunk_gated_delta_rule")
        + THEIRS.format("_fla_fused_recurrent_gated_delta_rule"),
    "torchtitan/distributed/utils.py": "on = False\ndef is_in_batch_invariant_mode():\n    return on\n",
    "spmd_types.py": "registered = []\nregister_local_autograd_function = registered.append\n"}


@pytest.fixture
def host(tmp_path, monkeypatch):
    """A function that makes a host's package, with no trace of the last one, and imports its plug-in."""
    def forget():
        for name in [n for n in sys.modules if n.split(".")[0] in ("megatron", "torchtitan", "spmd_types")]:
            del sys.modules[name]

    def make(files, plug_in):
        packages.put(files, tmp_path, monkeypatch)
        name = f"gdn_codegen.integrations.{plug_in}"
        sys.modules.pop(name, None)
        plugged.append(importlib.import_module(name))
        return plugged[-1]
    plugged = []
    forget()
    integrations.reset()
    yield make
    for x in plugged:
        x.disable()
        del sys.modules[x.__name__]
    forget()
    integrations.reset()


def batched(x, *names):
    return [x[n][None].clone() for n in names]


def checked(x, got, state=None):
    o, final = expected(x)
    assert rms_error(got[0], o) < 1e-5
    if state is not None:
        assert rms_error(state, final) < 1e-5


def gradients(x, made):
    """Of the sum of squares of o by q, k, v, g and beta: by `made`, from these, and by the recurrence in float64."""
    names, found = ("q", "k", "v", "g", "beta"), []
    for exact in (False, True):
        leaves = [x[n].to(torch.float64 if exact else x[n].dtype).requires_grad_() for n in names]
        if exact:
            q, k, v, g, beta = leaves
            of = q.shape[1] // -v.shape[1] * -1
            start = torch.zeros(q.shape[2], v.shape[2], dtype=torch.float64)
            at, loss = 0, 0.0
            for length in x["lengths"]:
                s = slice(at, at := at + length)
                for h in range(v.shape[1]):
                    loss = loss + recurrence(q[s, h // of], k[s, h // of], v[s, h], g[s, h], beta[s, h], x["scale"],
                                             start)[0].square().sum()
        else:
            loss = made(*(y[None] for y in leaves)).square().sum()
        found.append(torch.autograd.grad(loss, leaves))
    return {n: rms_error(a, b) for n, a, b in zip(names, *found, strict=True)}


# --- Megatron-LM -----------------------------------------------------------------------------------------------------
def megatron_call(rule, inputs, cu_seqlens=None):
    """As GatedDeltaNet.forward calls what it bound: q, k, v of all value heads, normalised; g in float32."""
    o, _ = rule(**dict(zip(("q", "k", "v", "g", "beta"), inputs, strict=True)), initial_state=None, output_final_state=False,
                use_qk_l2norm_in_kernel=False, cu_seqlens=cu_seqlens)
    return o


@pytest.mark.slow
@pytest.mark.parametrize("name", ["chunk_gated_delta_rule", "torch_chunk_gated_delta_rule"])
def test_megatron_s_layer_on_packed_sequences(name, host):
    plug_in = host(MEGATRON, "megatron")
    gdn = importlib.import_module("megatron.core.ssm.gated_delta_net.gdn")
    x = problem([0, 37, 3, 0], 2, 2, 16, 16, torch.float32, initial=False, same_keys=True)
    ends = torch.tensor([0, 0, 37, 40, 40], dtype=torch.int32)
    checked(x, megatron_call(getattr(gdn, name), batched(x, "q", "k", "v", "g", "beta"), ends))
    assert integrations.report() == f"megatron: {name}: served: 1"
    plug_in.disable()
    with pytest.raises(AssertionError, match=f"{name} of the host was called"):
        megatron_call(getattr(gdn, name), batched(x, "q", "k", "v", "g", "beta"))


@pytest.mark.long
@pytest.mark.parametrize("name", ["chunk_gated_delta_rule", "torch_chunk_gated_delta_rule"])
def test_megatron_trains_on_packed_sequences(name, host):
    host(MEGATRON, "megatron")
    gdn = importlib.import_module("megatron.core.ssm.gated_delta_net.gdn")
    x = problem([0, 37, 3, 0], 2, 2, 16, 16, torch.float32, initial=False, same_keys=True)
    ends = torch.tensor([0, 0, 37, 40, 40], dtype=torch.int32)
    assert max(gradients(x, lambda *y: megatron_call(getattr(gdn, name), y, ends)).values()) < 1e-5


@pytest.mark.slow
def test_megatron_decodes_in_its_cache(host):
    """gated_delta_product.py, ssm_decode: two steps for each token, q and the decay zero where the token has none."""
    host(MEGATRON, "megatron")
    update = importlib.import_module("megatron.core.ssm.gated_delta_product").fused_recurrent_gated_delta_rule_update
    x = problem([2, 2, 2], 2, 2, 16, 16, torch.float32)
    x["q"][::2], x["g"][1::2] = 0, 0
    cache, slots = torch.full((5, 2, 16, 16), float("nan")), torch.tensor([4, -1, 0, 2], dtype=torch.int32)
    cache[slots[[0, 2, 3]].long()] = x["S"]
    inputs = [x[n] for n in ("q", "k", "v", "g", "beta")]
    rows = [torch.cat([y[:2], torch.full_like(y[:2], 9), y[2:]]).unflatten(0, (4, 2)) for y in inputs]
    for y in rows[3:]:  # a row of padding has what was left in the buffer
        y[1] = float("nan")
    q, k, v, g, beta = rows
    x["q"], x["k"] = (torch.nn.functional.normalize(y, dim=-1) for y in (x["q"], x["k"]))
    o, final = update(q, k, v, state=cache, g=g, beta=beta, state_indices=slots, use_qk_l2norm_in_kernel=True)
    assert final is cache and bool((o[1] == 0).all()) and bool(cache[[1, 3]].isnan().all())
    checked(x, [o[[0, 2, 3]].flatten(0, 1)], cache[slots[[0, 2, 3]].long()])

    alone = problem([1, 1], 2, 2, 16, 16, torch.float32, seed=1)
    pool = torch.cat([alone["S"], torch.full((1, 2, 16, 16), 7.0)])
    o, _ = update(*(alone[n].unflatten(0, (2, 1)) for n in ("q", "k", "v", "g", "beta")), state=pool)
    checked(alone, [o.flatten(0, 1)], pool[:2])
    assert bool((pool[2] == 7).all())


def test_megatron_s_other_ops_and_what_ours_refuse(host):
    host(MEGATRON, "megatron")
    gdn2 = importlib.import_module("megatron.core.ssm.gated_delta_net.gdn2")
    product = importlib.import_module("megatron.core.ssm.gated_delta_product")
    with pytest.raises(AssertionError, match="chunk_gdn2 of the host"):
        gdn2.chunk_gdn2(1, 2, 3, 4, 5, 6)
    with pytest.raises(AssertionError, match="chunk_gated_delta_product of the host"):
        product.chunk_gated_delta_product(q=1, k=2, v=3, g=4, beta=5, num_householder=0)
    assert "megatron: chunk_gated_delta_product: left to the host (num_householder: got 0;" in integrations.report()


@pytest.mark.parametrize("plug_in, module, names, more", [
    ("megatron", "megatron.core.ssm.gated_delta_net", ("chunk_gated_delta_rule", "torch_chunk_gated_delta_rule"), {}),
    ("torchtitan", "torchtitan.models.qwen3_5.model", ("_fla_chunk_gated_delta_rule", "_fla_fused_recurrent_gated_delta_rule"),
     {n: x for n, x in TORCHTITAN.items() if "gdn" not in n})])
def test_released_versions_have_the_functions_in_one_module(plug_in, module, names, more, host):
    """megatron-core 0.16.1 and torchtitan 0.3.0."""
    found = host({f"{module.replace('.', '/')}.py": "".join(map(THEIRS.format, names)), **more}, plug_in)
    assert sorted(found.enable()) == [f"{module}.{n}" for n in names]
    functions = [getattr(importlib.import_module(module), n) for n in names]
    for f in functions:
        with pytest.raises(AssertionError, match="of the host was called"):  # ours refuse the call
            f(1, 2, 3, g=4, beta=5)
    assert integrations.report().count("left to the host (") == len(names)


def test_versions_without_the_names_are_refused(host):
    with pytest.raises(ImportError, match=r"megatron: got a version without .*accepted: megatron-core"):
        host({"megatron/core/ssm/other.py": ""}, "megatron")
    with pytest.raises(ImportError, match="torchtitan: got a version without"):
        host({"torchtitan/models/other.py": ""}, "torchtitan")
    without = {n: x for n, x in TORCHTITAN.items() if n != "spmd_types.py"}
    with pytest.raises(ModuleNotFoundError, match="spmd_types"):
        host(without, "torchtitan")
    theirs = importlib.import_module("torchtitan.models.qwen3_5.gdn")._fla_chunk_gated_delta_rule
    assert not hasattr(theirs, "__wrapped__"), "given back"
    with pytest.raises(ModuleNotFoundError, match="nothing_here"):  # an error of the host's own import is not hidden
        host({**MEGATRON, "megatron/core/ssm/gated_delta_product.py": "import nothing_here"}, "megatron")


# --- torchtitan ------------------------------------------------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.long
def test_torchtitan_s_layer(host):
    host(TORCHTITAN, "torchtitan")
    gdn = importlib.import_module("torchtitan.models.qwen3_5.gdn")
    x = problem([37, 3], 2, 2, 16, 16, torch.float32, initial=False)
    ends = torch.tensor([0, 37, 40], dtype=torch.int32)

    def made(q, k, v, g, beta):
        """As GatedDeltaKernel.forward calls."""
        return gdn._fla_chunk_gated_delta_rule(q, k, v, g, beta, use_qk_l2norm_in_kernel=True, cu_seqlens=ends,
                                               cu_seqlens_cpu=ends.clone())[0]
    checked(x, made(*batched(x, "q", "k", "v", "g", "beta")))


@pytest.mark.slow
def test_torchtitan_s_trainer_and_generator_give_the_same_bits(host):
    """In its batch-invariant mode: recurrent_gdn_fwd on a pack, and VLLMInnerGatedDeltaNet prefilling and decoding a part."""
    host(TORCHTITAN, "torchtitan")
    gdn, utils = importlib.import_module("torchtitan.models.qwen3_5.gdn"), importlib.import_module("torchtitan.distributed.utils")
    utils.on = True
    x = problem([5, 23], 2, 2, 16, 16, torch.float32, initial=False)  # 16 bits would hide that sums differ
    x["q"].requires_grad_()

    def run(tokens, state, ends):
        y = [x[n][tokens][None] for n in ("q", "k", "v", "g", "beta")]
        return gdn._fla_fused_recurrent_gated_delta_rule(*y[:4], beta=y[4], initial_state=state, output_final_state=True,
                                                         use_qk_l2norm_in_kernel=True, cu_seqlens=torch.tensor(ends))
    o, _ = run(slice(0, 28), torch.zeros(2, 2, 16, 16), [0, 5, 28])
    first, state = run(slice(5, 25), torch.zeros(1, 2, 16, 16), [0, 20])
    steps = [first]
    for t in range(25, 28):
        step, state = run(slice(t, t + 1), state, [0, 1])
        steps.append(step)
    assert torch.equal(torch.cat(steps, 1), o[:, 5:])
    registered = [f.__name__ for f in importlib.import_module("spmd_types").registered]
    assert o.grad_fn.name().removesuffix("Backward") in registered
