"""The plug-in of transformers: small models with random weights, beside their own code in torch."""
import inspect
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from reference import rms_error

from gdn_codegen import integrations
from gdn_codegen.runtime.call import gradient, gradient_builds
from gdn_codegen.runtime.targets import runs

pytest.importorskip("transformers", "5.23", reason="needs transformers, 5.23")
from small_transformers import BASE, GLM, LENGTHS, MODELS, enabled, functions, make, own_code, prompts

from gdn_codegen.integrations import transformers as plugin

pytestmark = pytest.mark.skipif(not runs("tilelang", "cpu"), reason="needs TileLang and a C compiler")
#: Logits in float32; the state of a layer is float32 in its cache, too.
TOLERANCE = 1e-5
#: These run by default; tests/examples has others on all targets.
OFTEN = ("qwen3_next",)
#: Models whose code passes nothing about packed sequences to these layers, or to full attention in torch.
NOT_PACKED = ("mamba2", "granitemoehybrid")
MODULES = Path(find_spec("transformers").origin).parent / "models"


@pytest.fixture(autouse=True)
def nothing_recorded():
    integrations.reset()
    yield
    integrations.reset()


def models(often=OFTEN, without=()):
    return [pytest.param(n, marks=pytest.mark.slow if n in often else [pytest.mark.slow, pytest.mark.long])
            for n in MODELS if n not in without]


def counts():
    """Calls that were served, by function, and the number that were not."""
    lines = [line.split(": ") for line in integrations.report("transformers").splitlines()]
    return {line[1]: int(line[-1]) for line in lines if line[2] == "served"}, sum(line[2] != "served" for line in lines)


@torch.no_grad()
def outcome(model, new=4):
    """Logits of padded prompts at once, and in two parts through the cache; tokens generated greedily."""
    ids, mask = prompts()
    real, part = mask.bool(), 40
    whole = model(ids, attention_mask=mask, use_cache=False).logits[real]
    first = model(ids[:, :part], attention_mask=mask[:, :part], use_cache=True)
    name = "cache_params" if "cache_params" in first else "past_key_values"
    second = model(ids[:, part:], attention_mask=mask, use_cache=True, **{name: first[name]})
    tokens = model.generate(ids, attention_mask=mask, max_new_tokens=new, min_new_tokens=new, do_sample=False)
    return whole, torch.cat([first.logits, second.logits], 1)[real], tokens.tolist()


@pytest.mark.parametrize("name", models())
def test_logits_and_tokens(name):
    model = make(name)
    with own_code(model):
        want = outcome(model)
    with enabled(model):
        got = outcome(model)
    assert max(rms_error(x, y) for x, y in zip(got[:2], want[:2], strict=True)) < TOLERANCE and got[2] == want[2]
    served, left = counts()
    layers = sum(bool(plugin.PROMPTS & set(plugin._called(type(m)).values())) for m in model.modules())
    assert layers >= 2 and left == 0 and sorted(served.values()) == [3 * layers, 4 * layers], "four prompts, three steps"


@pytest.mark.slow
@pytest.mark.long
def test_a_text_model_without_a_head():
    from transformers.models.glm5_next import modeling_glm5_next as module
    torch.manual_seed(0)
    model = module.Glm5NextTextModel(module.Glm5NextTextConfig(**{**BASE, **GLM})).eval()
    ids, mask = prompts()
    def states():
        with torch.no_grad():
            return model(ids, attention_mask=mask, use_cache=False).last_hidden_state[mask.bool()]
    with own_code(model):
        want = states()
    with enabled(model):
        assert rms_error(states(), want) < TOLERANCE
    assert counts() == ({"chunk_kda": 3}, 0)


def trained(model):
    ids, mask = prompts()
    model.train().zero_grad()
    model(ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100), use_cache=False).loss.backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", models(often=()))
def test_gradients_of_all_parameters(name):
    model = make(name)
    with own_code(model):
        want = trained(model)
    with enabled(model):
        got = trained(model)
    assert counts()[1] == 0 and got.keys() == want.keys()
    apart = {n: rms_error(got[n], want[n]) for n in want}
    assert max(apart.values()) < 5e-4, max(apart, key=apart.get)


@pytest.mark.slow
def test_a_gradient_without_a_build_is_the_host_s(monkeypatch):
    """The whole call is left to the host, whose gradient it then is, and inference is served."""
    model = make(OFTEN[0])
    with own_code(model):
        want = trained(model)
    fall_back = plugin.falling_back  # where FLA is installed, the host's function calls that, which needs a GPU
    monkeypatch.setattr(plugin, "falling_back", lambda *about: fall_back(*about[:3], inspect.unwrap(about[3])))
    monkeypatch.setattr(gradient_builds, "unfit", lambda b: "too large")
    monkeypatch.setattr(gradient_builds, "_fitting", gradient_builds._fitting.__wrapped__)  # keeps nothing
    monkeypatch.setattr(gradient, "_built", set())
    with enabled(model):
        got = trained(model)
        report = integrations.report("transformers")
        assert report.startswith("transformers: chunk_gated_delta_rule: left to the host (target: got 'auto'; accepted: a target "
                                 "that has a gradient of gated_delta_rule with K = 32, V = 32 in float32 (too large)")
        assert counts() == ({}, 1) and got.keys() == want.keys() and all(torch.equal(got[n], want[n]) for n in want)
        with torch.no_grad():
            model(prompts()[0], use_cache=False)
        assert counts()[0] == {"chunk_gated_delta_rule": 3}


@torch.no_grad()
def in_one_row(model, *said):
    """Logits of the prompts in one row without padding. said: what tells of their ends."""
    ids, mask = prompts()
    lengths = torch.tensor(LENGTHS)
    ends = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
    tell = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": max(LENGTHS), "max_length_k": max(LENGTHS),
            "seq_idx": torch.repeat_interleave(lengths)[None].int()}
    places = torch.cat([torch.arange(n) for n in LENGTHS])[None]
    return model(ids[mask.bool()][None], position_ids=places, use_cache=False, **{n: tell[n] for n in said}).logits[0]


@pytest.mark.parametrize("name", models(without=NOT_PACKED))
def test_packed_prompts_are_kept_apart(name):
    """What is told is what transformers' collators make."""
    model, lengths = make(name), ("max_length_q", "max_length_k")
    ids, mask = prompts()
    with own_code(model), torch.no_grad():
        want = model(ids, attention_mask=mask, use_cache=False).logits[mask.bool()]
    with enabled(model):
        for said in (("cu_seq_lens_q", "cu_seq_lens_k", *lengths), ("cu_seq_lens_q", "cu_seq_lens_k"), ("seq_idx",),
                     ("cu_seq_lens_q", "seq_idx")):
            assert rms_error(in_one_row(model, *said), want) < TOLERANCE, said
    assert counts()[1] == 0
    with own_code(model):
        assert rms_error(in_one_row(model, "cu_seq_lens_q"), want) > 1e-2, "the host's code in torch joins them"


@pytest.mark.parametrize("name", models(often=()))
def test_bfloat16(name):
    """As far from the model in float32 as the host's own code is."""
    model, exact = make(name, torch.bfloat16), make(name)
    exact.load_state_dict(model.state_dict())
    ids, mask = prompts()
    def logits(m):
        with torch.no_grad():
            return m(ids, attention_mask=mask, use_cache=False).logits[mask.bool()].float()
    with own_code(model):
        want, own = logits(exact), logits(model)
    with enabled(model):
        got = logits(model)
    assert counts()[1] == 0 and rms_error(got, want) < 1.3 * rms_error(own, want) < 0.2


def test_calls_that_ours_refuses_are_the_host_s():
    """No kernel computes in float64."""
    model = make("nemotron_h", torch.float64)
    with own_code(model):
        want = outcome(model, new=2)
    with enabled(model):
        got = outcome(model, new=2)
    assert all(torch.equal(x, y) for x, y in zip(got[:2], want[:2], strict=True)) and got[2] == want[2]
    assert counts()[0] == {} and "left to the host (C: got torch.float64" in integrations.report("transformers")


def test_functions_are_given_back():
    model, other = make("qwen3_5"), make("mamba2")
    before = {(m.__name__, n): getattr(m, n) for m, n, _ in functions(model) + functions(other)}
    def now():
        return {(m.__name__, n): getattr(m, n) for m, n, _ in functions(model) + functions(other)}
    plugin.enable(model)
    plugin.enable(model, "triton")  # another target
    changed = {at[0].split(".")[-1] for at, f in now().items() if f is not before[at]}
    assert changed == {"modeling_qwen3_5"} and len(before) == 4 + 5
    replaced = {k for m, n, k in functions(model) if getattr(m, n) is not before[m.__name__, n]}
    assert replaced == {"chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule", "causal_conv1d_fn"}
    plugin.disable(other)
    plugin.disable(model)
    plugin.disable(model)
    assert now() == before


@pytest.mark.parametrize("what", [torch.nn.Linear(2, 2), "a Mamba-1"], ids=["linear", "mamba"])
def test_a_model_without_such_layers_is_refused(what):
    if isinstance(what, str):  # its selective_state_update has the name of Mamba-2's
        from transformers import MambaConfig, MambaModel
        what = MambaModel(MambaConfig(vocab_size=8, hidden_size=8, num_hidden_layers=1))
    with pytest.raises(ValueError, match=f"^model: got {type(what).__name__}, none of whose layers calls"):
        plugin.enable(what)


def served_modules():
    """The modules of transformers that register a function for a kernel of ours, by their text."""
    said = [f'use_kernel_func_from_hub_with_fallback("{n}"' for n in plugin.PROMPTS]
    return sorted(p for p in MODULES.glob("*/modeling_*.py") if any(x in p.read_text() for x in said))


def test_all_models_that_call_such_functions_are_served():
    found = served_modules()
    assert {p.parent.name for p in found} == {*MODELS, "glm5_next"}, "as docs/integrations.md lists them"
    for path in found:
        module = import_module(f"transformers.models.{path.parent.name}.{path.stem}")
        layers = [c for c in vars(module).values() if inspect.isclass(c) and issubclass(c, torch.nn.Module)
                  and c.__module__ == module.__name__ and plugin.PROMPTS & set(plugin._called(c).values())]
        steps = {n for c in layers for n in plugin._called(c).values()} & plugin.OURS.keys() - plugin.PROMPTS
        assert len(layers) == 1 and len(steps) == 1, path
    text = (Path(__file__).parents[2] / "docs" / "integrations.md").read_text()
    assert all(f"`{p.parent.name}`" in text for p in found)


@pytest.mark.slow
@pytest.mark.long
def test_a_step_writes_the_state_where_it_was():
    from transformers.models.qwen3_next import modeling_qwen3_next as module
    model = make("qwen3_next")
    gen = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 1, h, 32, generator=gen) for h in (2, 2, 4))
    g, beta, S = -torch.rand(2, 1, 4, generator=gen), torch.rand(2, 1, 4, generator=gen), torch.randn(2, 4, 32, 32, generator=gen)
    def call(state):
        return module.torch_recurrent_gated_delta_rule(
            q, k, v, g=g, beta=beta, initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True,
            cu_seqlens=None, output_attentions=False, is_causal=True)
    with own_code(model):
        want = call(S.clone())
    kept = S.clone()
    with enabled(model), torch.no_grad():
        o, final = call(kept)
    assert final is kept and rms_error(o, want[0]) < TOLERANCE and rms_error(kept, want[1]) < TOLERANCE
    assert counts() == ({"fused_recurrent_gated_delta_rule": 1}, 0)


def test_a_step_with_gradients_leaves_the_state():
    """It may be needed again."""
    x, state = torch.zeros(1), torch.zeros(1)
    step = plugin._step(lambda *args, **said: said["final_state"])
    assert step(x, x, x, x, x, state, True) is None
    with torch.no_grad():
        assert step(x, x, x, x, x, state, True) is state
        assert step(x, x, x, x, x, state, False) is None and step(x, x, x, x, x, None, True) is None


@pytest.mark.parametrize("bias", [True, False])
def test_a_packed_convolution(bias):
    gen = torch.Generator().manual_seed(0)
    x, weight, b = (torch.randn(*s, generator=gen).requires_grad_() for s in ((1, 6, 20), (6, 4), (6,)))
    ends = torch.tensor([0, 2, 2, 11, 20])
    numbers = plugin._numbers(ends, 20)
    assert torch.equal(numbers[0], torch.repeat_interleave(ends.diff()).int())
    theirs = torch.nn.functional.conv1d
    rows = [theirs(y, weight[:, None], b if bias else None, padding=3, groups=6)[..., :y.shape[-1]]
            for y in x.split(ends.diff().tolist(), -1) if y.shape[-1]]
    want = torch.nn.functional.silu(torch.cat(rows, -1))
    got = plugin._convolved(x, weight, b if bias else None, "silu", numbers)
    assert rms_error(got, want) < 1e-6
    for y, z in zip(torch.autograd.grad(got.sum(), [x, weight]), torch.autograd.grad(want.sum(), [x, weight]), strict=True):
        assert rms_error(y, z) < 1e-6


def test_a_convolution_goes_to_the_host_where_that_packs():
    heard = []
    def theirs(hidden_states, weight, bias=None, activation=None, **kwargs):
        heard.append(kwargs)
        return hidden_states
    call, x = plugin._convolution(theirs), torch.randn(1, 2, 9)
    call(x, torch.randn(2, 4), cu_seq_lens_q=torch.tensor([0, 9]), use_cache=False)
    call(x, torch.randn(2, 4), cu_seq_lens_q=torch.tensor([0, 4, 9]))
    call(x, torch.randn(2, 4), seq_idx=torch.tensor([[0, 0, 1, 1, 1]]))  # behind four tokens of a cache
    assert [n.keys() for n in heard] == [set(), {"seq_idx"}, {"seq_idx"}]
    assert heard[1]["seq_idx"].tolist() == [[0] * 4 + [1] * 5] and heard[2]["seq_idx"].tolist() == [[0] * 6 + [1] * 3]


@pytest.mark.slow
def test_layers_compile_whole():
    model = make("qwen3_5")
    layer = next(m for m in model.modules() if plugin.PROMPTS & set(plugin._called(type(m)).values()))
    x = torch.randn(2, 70, 64, generator=torch.Generator().manual_seed(0))
    with enabled(model), torch.no_grad():
        want = layer(x)
        assert torch.equal(torch.compile(layer, backend="eager", fullgraph=True)(x), want)
    assert counts() == ({"chunk_gated_delta_rule": 1}, 0)
