"""GPUs whose blocks may take less shared memory than an H100's: what dispatch chooses there, and that TileLang takes its text."""
import pytest
import torch
from choices import a_call

from gdn_codegen import algorithms, options
from gdn_codegen.cli_parser import parser
from gdn_codegen.passes.storage.live_bytes import packed_bytes
from gdn_codegen.runtime.build import Build, lowered
from gdn_codegen.runtime.call import choose, choose_decode
from gdn_codegen.runtime.call.device import described, gpu
from gdn_codegen.runtime.call.gradient_builds import _fitting, asked_of
from gdn_codegen.runtime.call.tables import Extent
from gdn_codegen.schedule import ScheduleError, named, varied
from gdn_codegen.schedule.contract import PLAIN
from gdn_codegen.tools import tune_backward, tune_decode, tune_jobs, tune_log
from gdn_codegen.tools.shapes import Shape

SMALL = {"sm_80 x 108": 163, "sm_89 x 142": 99}


def shared(b):
    """The bytes that each kernel of a build takes."""
    return [packed_bytes(k) for k in lowered(b).kernels]


@pytest.mark.parametrize("words, kib", [*SMALL.items(), ("NVIDIA A100-SXM4-80GB", 163), ("sm_120 x 170", 99), ("NVIDIA H200", 0),
                                        ("sm_100 x 148", 0), ("cpu", 0)])
def test_what_dispatch_knows_of_a_gpu(words, kib):
    assert described(words).shared_kib == kib


def test_amds_gpus_have_other_limits():
    assert gpu("", "sm_80", 104, amd=True).shared_kib == 0


@pytest.mark.parametrize("target, kib", [("tilelang", 163), ("triton", 0)])
def test_the_build_of_a_call_says_how_much_it_may_take(target, kib):
    call = a_call(Extent(16, 16, 1, 8192), torch.bfloat16, "meta", (128, 128), PLAIN, target=target)
    choose.kept_choice.cache_clear()
    assert choose.choice(call, described("NVIDIA A100-SXM4-80GB")).build.plan.shared_kib == kib
    assert choose.choice(call, described("NVIDIA H200")).build.plan.shared_kib == 0
    choose.kept_choice.cache_clear()


@pytest.mark.parametrize("words", ["sm_89 x 142", pytest.param("sm_80 x 108", marks=[pytest.mark.slow, pytest.mark.long])])
@pytest.mark.parametrize("page, size", [*((p, 128) for p in algorithms.names()), ("kimi_delta_attention", 192), ("mamba2", 192)])
def test_every_page_has_builds_that_fit(page, size, words):
    """Forward and backward passes of TileLang. Of K = 192 loads come early to buffers of their own, whose rows are padded."""
    on, limit = described(words), SMALL[words] * 1024
    b = Build("tilelang", algorithm=page, dtype="bfloat16", head_dim_k=size, head_dim_v=size)
    found, why = choose.first(torch.device("cuda"), ("model", (
        (x.for_shared(on.shared_kib), reason) for x, reason in choose.modelled(b, on.arch, False, (0, 3, 12), None))))
    assert found, why
    gradient = _fitting(asked_of(b, True), "tilelang", on, 64, torch.device("cuda"), (0, 3, 12), True, False)
    assert not isinstance(gradient, str), gradient
    for x in (found.build, *gradient.all):
        assert x.plan.shared_kib == SMALL[words] and max(shared(x)) <= limit, (x.name, shared(x))


def test_decoding_steps_fit():
    """Eight tokens of a state in float32 take more than 163 KiB otherwise."""
    call = a_call(Extent(2, 2, 4, 32), torch.float32, "meta", (256, 256), PLAIN, algorithm="rwkv7", target="tilelang")
    choose_decode.kept_choice.cache_clear()
    found = [choose_decode.kept_choice(call, Extent(2, 2, 4, 32), ("tilelang",), described(x)) for x in (*SMALL, "NVIDIA H200")]
    choose_decode.kept_choice.cache_clear()
    for choice, kib in zip(found, (163, 99, 0), strict=True):
        assert choice is None or (choice.build.plan.shared_kib == kib and max(shared(choice.build)) <= (kib or 227) * 1024)
    assert found[2] is not None


@pytest.mark.parametrize("arch, kib", [("sm_80", 163), ("sm_89", 99), ("sm_100", 0)])
def test_a_build_that_is_compiled_for_a_gpu_fits_it(arch, kib):
    words = ["build", "--target", "tilelang", "--algorithm", "gated_delta_rule_2", "--dtype", "bfloat16", "--compile", arch]
    (found,) = options.choices(parser().parse_args(words))
    assert found.build.plan.shared_kib == kib and max(shared(found.build)) <= (kib or 227) * 1024


def test_a_schedule_says_how_much_a_block_may_take():
    """The text of a kernel that fits anyway is the same."""
    large = Build("tilelang", algorithm="kimi_delta_attention", dtype="bfloat16", schedule="fused")
    with pytest.raises(ScheduleError, match="shared of hopper with 99 KiB has 101376 bytes"):
        lowered(large.for_shared(99))
    small = Build("tilelang", head_dim_k=32, head_dim_v=32)
    assert lowered(small.for_shared(99)) == lowered(small) and small.for_shared(0) == small
    assert small.for_shared(99).plan == varied(named(small.plan.name).name, shared_kib=99)


def sums_of_columns():
    """A kernel that sums the columns of a product. It did not compile for GPUs before Hopper, where warps shared out rows and
    columns, nor for those after it, where threads exchanged several sums at a time."""
    import tilelang.language as T

    from gdn_codegen.emit.tilelang.device.products import gemm_cuda
    from gdn_codegen.emit.tilelang.device.sums import column_sum_cuda

    @T.prim_func
    def kernel(a: T.Tensor((64, 64), "bfloat16"), out: T.Tensor((128,), "float32")):
        with T.Kernel(1, threads=256):
            x, y = T.alloc_shared((64, 64), "bfloat16"), T.alloc_shared((64, 128), "bfloat16")
            z, total = T.alloc_fragment((64, 128), "float32"), T.alloc_shared((128,), "float32")
            T.copy(a, x)
            for i, j in T.Parallel(64, 128):
                y[i, j] = a[i, j % 64]
            gemm_cuda(x, y, z)
            column_sum_cuda(z, total)
            T.copy(total, out)

    return kernel


def sum_of_192():
    """A kernel that sums 192 numbers. It did not compile with more threads than numbers, so that no gradient with V = 192 did."""
    import tilelang.language as T

    from gdn_codegen.emit.tilelang.device.sums import vector_sum_cuda

    @T.prim_func
    def kernel(a: T.Tensor((192,), "float32"), out: T.Tensor((1,), "float32")):
        with T.Kernel(1, threads=512):
            x, total = T.alloc_shared((192,), "float32"), T.alloc_shared((1,), "float32")
            T.copy(a, x)
            vector_sum_cuda(x, total)
            T.copy(total, out)

    return kernel


@pytest.mark.slow
@pytest.mark.parametrize("make, arch", [*((sums_of_columns, a) for a in ("sm_80", "sm_89", "sm_90a", "sm_100", "sm_120")),
                                        (sum_of_192, "sm_80"), (sum_of_192, "sm_90a"), (sum_of_192, "sm_100")])
def test_tilelang_has_sums_on_each_gpu(make, arch):
    """It refuses to write CUDA text for a kernel for which it finds no layouts."""
    tilelang = pytest.importorskip("tilelang")
    with tilelang.tvm.target.Target({"kind": "cuda", "arch": arch}) as target:
        assert tilelang.lower(make(), target=target, enable_device_compile=False).kernel_source


A100 = ("NVIDIA A100-SXM4-80GB", "sm_80 x 108", "sm_80")
SHAPES = [Shape("long", (4096,), 4, 4)]


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("what", ["prefill", "decode", "backward"])
def test_what_is_tuned_fits(what, tmp_path):
    """All candidates of TileLang, and the model's choice that a table compares them with. A table keeps the number."""
    kib, about = tune_jobs.shared_kib(A100), Build("tilelang", dtype="bfloat16")
    todo = {"prefill": lambda: tune_jobs.jobs(about, SHAPES, "", 108, kib),
            "decode": lambda: tune_decode.jobs(about, tune_decode.CONTRACTS[:1], [Shape("few", (1,), 4, 4)], 108, kib),
            "backward": lambda: tune_backward.jobs([about], SHAPES, "", 108, kib)}[what]()
    assert kib == 163 and {j.build.plan.shared_kib for j in todo if j.build.target == "tilelang"} == {163}
    found = [j.build for j in todo if j.build.target == "tilelang" and choose.fits(j.build)]
    assert found and all(max(shared(b)) <= 163 * 1024 for b in found)
    log = tune_log.Log(tmp_path / "log.jsonl", {"target": todo[0].table or "tilelang", "device": A100[0]})
    first = next(j for j in todo if j.build.target == "tilelang" and choose.fits(j.build))
    log.results[first.key] = {"ms": 1.0}
    (row,) = tune_log.table(log, "", 108)["rows"]
    assert row["build"]["set"]["shared_kib"] == 163 and tune_log.job_of(first.key, log.head["target"]).build == first.build
    assert row["model_ms"] == 1.0 or what == "decode"  # there the model's choice is Triton's


def test_an_h100_has_all_that_kernels_were_made_for():
    assert tune_jobs.shared_kib(("NVIDIA H200", "sm_90 x 132", "sm_90")) == 0
