"""FLA's layers on the plug-in's ops: training steps and decoding from FLA's cache, beside FLA's references in float64."""
import pytest
import torch

pytest.importorskip("fla.layers", reason="needs flash-linear-attention")
import fla_on_cpu as host

from gdn_codegen import integrations

TOLERANCE = 1e-5
#: The layer whose training step the default suite runs. Each layer compiles three builds.
CHEAP = "SimpleGatedLinearAttention"
#: What a layer calls, for prompts and for steps.
CALLED = {"GatedDeltaNet": ("chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"),
          "KimiDeltaAttention": ("chunk_kda", "fused_recurrent_kda"),
          "DeltaNet": ("chunk_delta_rule", "fused_recurrent_delta_rule"),
          "GatedLinearAttention": ("chunk_gla", "fused_recurrent_gla"),
          "SimpleGatedLinearAttention": ("chunk_simple_gla", "fused_recurrent_simple_gla"),
          "GatedDeltaNet2": ("chunk_gdn2", "fused_recurrent_gdn2"),
          "GatedDeltaProduct": ("chunk_gated_delta_product", "fused_recurrent_gated_delta_rule"),
          "RWKV7Attention": ("chunk_dplr_delta_rule", "fused_mul_recurrent_rwkv7")}


@pytest.fixture(scope="module", autouse=True)
def enabled():
    from gdn_codegen.integrations import fla
    fla.enable()
    yield
    fla.disable()


@pytest.fixture(autouse=True)
def on_cpu():
    integrations.reset()
    with host.on_cpu():
        yield


def served():
    """Calls by function, none of which fell back."""
    lines = [line.split(": ") for line in integrations.report("fla").splitlines()]
    assert all(kind == "served" for _, _, kind, _ in lines), integrations.report()
    return {name: int(n) for _, name, _, n in lines}


def agree(got, want):
    assert got.keys() == want.keys()
    for name, x in want.items():
        assert host.error(got[name], x) < TOLERANCE, name


def inputs(T):
    return torch.randn(2, T, 64, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow if n == CHEAP else pytest.mark.long)
                                  for n in host.LAYERS])
def test_a_step_of_training(name):
    made, x = host.layer(name), inputs(70)
    got = host.step_of_training(made, x)
    assert len(got) > 8 and served() == {CALLED[name][0]: 1}
    made.zero_grad()
    agree(got, host.by_references(made, host.step_of_training, x))


@pytest.mark.long
@pytest.mark.parametrize("name", host.LAYERS)
def test_a_prompt_and_steps_from_the_cache(name):
    made, x = host.layer(name), inputs(73)
    got = host.decoded(made, x, (70, 1, 2))
    assert served() == {CALLED[name][0]: 1, CALLED[name][1]: 2}
    agree(got, host.by_references(made, host.decoded, x, (70, 1, 2)))


@pytest.mark.long
@pytest.mark.parametrize("name", ["GatedDeltaNet", "KimiDeltaAttention", "GatedDeltaProduct"])
def test_padded_prompts_are_packed(name):
    """FLA's layers pack the tokens that a mask keeps, and call the ops with cu_seqlens."""
    made, x = host.layer(name), inputs(72)
    mask = (torch.arange(72) >= torch.tensor([[0], [25]])).long()
    got = host.decoded(made, x, (70, 1, 1), mask)
    want = host.by_references(made, host.decoded, x, (70, 1, 1), mask)
    assert served() == {CALLED[name][0]: 1, CALLED[name][1]: 2}
    agree(got, want)
    assert host.error(got["y"], host.by_references(made, host.decoded, x, (70, 1, 1))["y"]) > 0.01
