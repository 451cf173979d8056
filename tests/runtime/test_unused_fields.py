"""Fields of a schedule that a target's passes do not read: the list is right, and --set refuses them."""
from dataclasses import replace

import pytest

from gdn_codegen.cli import main
from gdn_codegen.runtime.build import Build, render
from gdn_codegen.schedule import named, varied
from gdn_codegen.schedule.agents import ASSIGNMENTS
from gdn_codegen.schedule.contract import Contract
from gdn_codegen.schedule.schedule import CHOICES
from gdn_codegen.targets import find

#: Fields with the values to try. What concerns the page's values alone, every target reads.
VALUES = {**{n: v for n, v in CHOICES.items() if n not in ("form", "inverse", "launch", "partition")},
          "agents": ("", *ASSIGNMENTS), "v_piece": (0, 16), "residuals": ("", "@state")}
#: For each target a schedule in which each field that it reads makes a difference. Only PTO has no parts.
PLANS = {("triton", ""): varied("walk", partition="decay", descriptors=False), ("pto", ""): named("staged"),
         ("tilelang", ""): varied("staged", partition="decay"),
         ("tilelang", "sm_90a"): varied("walk", "sm_90a", partition="decay")}


def module(target, arch, schedule, chunk=64, state="", algorithm="gated_delta_rule", dims=(128, 64)):
    """The module's lines but those that name its schedule, and the length of its check; None if the schedule is refused."""
    try:
        b = Build(target, chunk, algorithm=algorithm, schedule=schedule, arch=arch, head_dim_k=dims[0], head_dim_v=dims[1],
                  contract=Contract.parse(state))
        return [x for x in render(b).splitlines() if not any(y in x for y in ("Made by:", b.name, "check_chunks="))]
    except ValueError:
        return None


@pytest.mark.slow
@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("target, arch", PLANS)
def test_what_is_unused_changes_nothing_and_all_else_does(target, arch):
    plan = PLANS[target, arch]
    before, read = {x.partition: module(target, arch, x) for x in (plan, replace(plan, partition=None))}, set()
    assert all(before.values())
    for field, values in VALUES.items():
        if field != "longest_first" or plan.partition:
            on = replace(plan, partition=None) if field in ("persistent", "by_length") else plan
            after = [module(target, arch, replace(on, **{field: v})) for v in values[:3]]
            read |= {field} if any(x != before[on.partition] for x in after) else set()
    one, two = (module(target, arch, replace(plan, k_piece=16, piece_warps=n)) for n in (1, 2))  # what only pieces have
    read |= {"piece_warps"} if one != two else set()
    if not arch and target != "pto":  # what only chunks of one token have
        early, late = (module(target, arch, varied("fused", token_groups=v), 1, "state=float16") for v in CHOICES["token_groups"])
        read |= {"token_groups"} if early != late else set()
    if target != "pto":  # what only gradients have: tiles between kernels that elementwise ops read
        plans = (varied("gradient", arch, narrow_workspaces=x, stages=1) for x in (False, True))
        wide, narrow = (module(target, arch, plan, algorithm="simple_gla.gradient") for plan in plans)
        read |= {"narrow_workspaces"} if wide != narrow and narrow else set()
    name, fields = ("prepared", {"v_piece": 16}) if target == "pto" else ("gradient", {"stages": 1, "v_block": 64})
    whole, pieces = (module(target, arch, varied(name, arch, padded_pieces=x, **fields), algorithm="simple_gla.gradient",
                            dims=(36, 56) if target == "pto" else (248, 128)) for x in (False, True))
    read |= {"padded_pieces"} if pieces and whole != pieces else set()
    assert set(VALUES) - read == set(find(target).lowered_for(arch).unused)


@pytest.mark.parametrize("words, said", [
    (["--target", "triton", "--set", "value_heads=2"], "set: got value_heads, which has no effect for triton; accepted: "
     "value_heads with --target tilelang or tilelang --arch sm_90a or pto"),
    (["--target", "tilelang", "--arch", "sm_90a", "--set", "warps=4"], "accepted: warps with --target triton"),
    (["--target", "pto", "--set", "stages=1"], "accepted: stages with --target triton or tilelang --arch sm_90a")])
def test_set_refuses_what_is_unused(words, said, capsys, tmp_path):
    assert main(["build", *words, "--out", str(tmp_path)]) == 2
    assert said in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_a_field_that_one_of_several_targets_uses_is_taken(tmp_path):
    words = ["build", "--target", "all", "--schedule", "fused", "--out", str(tmp_path)]
    assert main([*words, "--set", "prefetch=no"]) == 0 and len(list(tmp_path.rglob("*.py"))) == 3
