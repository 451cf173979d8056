"""What is built where no schedule is named: what the op would choose on the GPUs that are."""
import pytest
import torch
from choices import a_call

from gdn_codegen import options
from gdn_codegen.cli import main
from gdn_codegen.cli_parser import parser
from gdn_codegen.runtime.build import Build
from gdn_codegen.runtime.call import choose
from gdn_codegen.runtime.call.device import Facts
from gdn_codegen.runtime.call.size import Size
from gdn_codegen.runtime.call.tables import Extent
from gdn_codegen.targets import DEFAULT_SCHEDULE

HOPPER = {"sm_90": "sm_90a", "gfx942": "", "sm_90a": "sm_90a"}


def built(*words):
    (b,) = options.builds(parser().parse_args(["build", *words]))
    return b


@pytest.mark.slow
@pytest.mark.parametrize("target, gpu", [("triton", "sm_90"), ("triton", "gfx942"), ("tilelang", "sm_90a")])
@pytest.mark.parametrize("more", [[], ["--chunk", "64"], ["--partition", "decay"], ["--head-dim-k", "256", "--head-dim-v", "256"],
                                  ["--dtype", "float32"]], ids=" ".join)
def test_it_is_what_a_call_gets_there(target, gpu, more, monkeypatch):
    """By the op's own choice on such a device, for which no table has been written."""
    monkeypatch.setattr(choose, "_check_fits", lambda *a: None)
    said = dict(zip(more[::2], more[1::2], strict=True))
    wide, dtype = int(said.get("--head-dim-k", 128)), getattr(torch, said.get("--dtype", "float16"))
    choose.kept_choice.cache_clear()
    asked = a_call(Extent(1, 1, 1, 1), dtype, "cuda", (wide, wide), chunk_size=64 if "--chunk" in said else None)
    want = choose.kept_choice(asked, target, Size((0, 0, 0), "--partition" in said),
                              Facts("cuda", (f"a {gpu}",), HOPPER[gpu])).build
    choose.kept_choice.cache_clear()
    if target == "tilelang" and not want.arch:  # a module for Hopper alone there is none
        with pytest.raises(ValueError, match=r"arch: got 'sm_90a', for which nothing fits \(.*\); accepted: no --arch; the op "
                                             f"then takes --schedule {want.plan.name} --chunk 64"):
            built("--target", target, "--arch", gpu, *more)
    else:
        assert built("--target", target, "--arch", gpu, *more) == want


def test_without_a_gpu_it_is_what_any_gets():
    assert built("--target", "triton").name == "gdn_c32_bthd_walk_stages3"
    assert built("--target", "triton", "--chunk", "64").name == "gdn_c64_bthd_walk"
    assert built("--target", "triton", "--arch", "sm_90,gfx942") == built("--target", "triton", "--arch", "gfx942") \
        == built("--target", "triton")
    assert built("--target", "triton", "--compile", "sm_90a") == built("--target", "triton", "--arch", "sm_90")
    assert built("--target", "tilelang").name == built("--target", "pto").name == "gdn_c64_bthd"


def test_what_is_named_stays_as_it_is_asked_for():
    for target in ("triton", "tilelang", "pto"):
        for name in ("fused", "staged", "prepared"):
            assert built("--target", target, "--schedule", name) == Build(target, schedule=Build(target, schedule=name).plan)
    assert built("--target", "triton", "--set", "kernels=o,S").plan.name == DEFAULT_SCHEDULE
    assert built("--target", "triton", "--set", "stages=1").name == "gdn_c32_bthd_walk_stages1"


def test_a_build_says_why_on_stderr(tmp_path, capsys):
    small = ["build", "--target", "triton", "--head-dim-k", "16", "--head-dim-v", "16", "--out", str(tmp_path)]
    assert main(small) == 0
    out, err = capsys.readouterr()
    assert err == "gdn_codegen: triton: schedule walk, chunks of 32: made for GPUs\n" and out.count("\n") == 2
    assert main([*small, "--schedule", "walk"]) == 0 and capsys.readouterr().err == ""
