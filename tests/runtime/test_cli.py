"""The command line refuses before it works: numbers, options that mean nothing, places that cannot be written."""
import subprocess
import sys
from pathlib import Path

import pytest

import gdn_codegen
from gdn_codegen import algorithms, cli
from gdn_codegen.tools import bench_errors, bench_pto, report, tune
from gdn_codegen.tools.shapes import SHAPES

ROOT = Path(__file__).parents[2]
PTO, GPU = ["bench", "--target", "pto", "--schedule", "fused"], ["bench", "--target", "triton", "--schedule", "fused"]
ERRORS = [*GPU, "--errors", "1", "--interpret"]
SMALL = ["--chunk", "16", "--head-dim-k", "16", "--head-dim-v", "16"]


def refusal(words, capsys):
    """The one line that the command says."""
    assert cli.main(words) == 2
    out, err = capsys.readouterr()
    assert not out and err.startswith("gdn_codegen: ") and err.count("\n") == 1, err
    return err[len("gdn_codegen: "):]


@pytest.mark.parametrize("words, said", [
    *((way + words, said) for way in (PTO, GPU) for words, said in (
        (["--heads", "0"], "heads: got '0'; accepted: 1 or more, or H/HV"),
        (["--heads", "3/4"], "heads: got '3/4'; accepted: H/HV, as 16/32: HV a multiple of H"),
        (["--heads", "0/4"], "heads: got '0/4'"), (["--heads", ""], "heads: got ''; accepted: H/HV"),
        (["--heads", "4", "--value-heads", "6"], "value_heads: got 6; accepted: a multiple of 4"),
        (["--heads", "2/6", "--value-heads", "4"], "value_heads: got 4; accepted: no --value-heads beside --heads 2/6"),
        (["--value-heads", "0"], "value_heads: got 0; accepted: 1 or more"), (["--value-heads", "-4"], "value_heads: got -4"),
        (["--tokens", "-4"], "tokens: got -4; accepted: 1 or more"), (["--tokens", "0"], "tokens: got 0"))),
    ([*PTO, "--blocks", "0"], "blocks: got 0; accepted: 1 or more"),
    ([*GPU, "--runs", "-7"], "runs: got -7; accepted: 1 or more"),
    ([*GPU, "--runs", "0"], "runs: got 0"), (["tune", "--runs", "0"], "runs: got 0"),
    (["tune", "--budget", "-1"], "budget: got -1; accepted: 0 or more"), (["tune", "--budget", "nan"], "budget: got nan"),
    (["tune", "--memory", "-1"], "memory: got -1; accepted: 0 or more"), (["tune", "--memory", "inf"], "memory: got inf"),
    *((["build", "--accept", f"{n}={form}"], f"accept: got {n}={form}; accepted for {n}: {fit}") for n, form, fit in (
        ("q", "unit", "l2norm"), ("v", "unit", "no form"), ("v", "l2norm", "no form"), ("q", "raw", "l2norm"),
        ("beta", "raw", "sigmoid, twice_sigmoid"), ("g", "sigmoid", "linear, raw"))),
    (["build", "--heads", ""], "heads: got ''"), (["build", "--target", "pto", "--heads", "3/4"], "heads: got '3/4'")])
def test_numbers_and_forms(words, said, capsys):
    assert refusal(words, capsys).startswith(said)


@pytest.mark.parametrize("words, said", [
    *(([*PTO, *words], f"{words[0][2:]}: got {got} with --target pto; accepted: with {ways}") for words, got, ways in (
        (["--shapes", "x"], "'x'", "times on a GPU or with --errors"), (["--only", "x"], "['x']", "times on"),
        (["--peers", "none"], "'none'", "times on"), (["--seed", "0"], "0", "times on"),
        (["--gates", "layer"], "'layer'", "times on"),
        (["--runs", "3"], "3", "times on a GPU"), (["--interpret"], "True", "--errors"))),
    ([*GPU, "--blocks", "2"], "blocks: got 2 with times on a GPU; accepted: with --target pto"),
    ([*GPU, "--trace", "x"], "trace: got 'x' with times"), ([*GPU, "--interpret"], "interpret: got True with times"),
    ([*ERRORS, "--runs", "15"], "runs: got 15 with --errors; accepted: with times on a GPU"),
    ([*ERRORS, "--trace", "x"], "trace: got 'x' with --errors; accepted: with --target pto"),
    ([*ERRORS, "--plot", "x"], "plot: got 'x' with --errors"), ([*ERRORS, "--detail"], "detail: got True with --errors"),
    ([*ERRORS, "--shapes", "x", "--tokens", "9"], "tokens: got 9 with --shapes; accepted: without"),
    ([*PTO, "--plot", "p.foo"], "plot: got p.foo; accepted: a file *.png"),
    ([*GPU[:3], "--schedule", "none", "--peers", "none"], "schedule: got 'none' without peers; accepted: auto, all"),
    ([*GPU[:3], "--schedule", "none", *ERRORS[5:]], "schedule: got 'none' without peers"),
    ([*GPU[:3], "--schedule", "auto", "--launch", "single"], "launch: got 'single' with --schedule auto"),
    *(([*PTO, *SMALL, "--accept", x], f"accept: got {x!r}; accepted: forms that need no further tensors")
      for x in ("g=raw", "g=float16", "state=pool", "state=in_place")),
    *(([*ERRORS, *SMALL, "--accept", x], f"accept: got {x!r}; accepted: k=unit, strided, both, or none")
      for x in ("beta=sigmoid", "state=vk", "g=raw", "k=l2norm")),
    (["build", "--target", "triton", "--compile-heads", "1/2"], "compile_heads: got ['1/2'] without --compile; accepted: with"),
    (["build", "--target", "tilelang", "--compile", "--compile-heads", "1/2"],
     "compile_heads: got ['1/2'] with --target tilelang"),
    (["build", "--cached", "--out", "x"], "out: got 'x' with --cached"),
    (["tune", "--compile", "sm_90a", "--runs", "3"], "runs: got 3 with --compile; accepted: without"),
    (["tune", "--compile", "sm_90a", "--list"], "list: got True with --compile"),
    (["tune", "--compile", "foo"], "compile: got 'foo'"), (["tune", "--list", "--budget", "0"], "budget: got 0.0 with --list")])
def test_options_that_mean_nothing(words, said, capsys):
    assert refusal(words, capsys).startswith(said)


@pytest.mark.parametrize("words", [["--accept", "strided"], ["--accept", "k=unit,strided"]], ids="".join)
def test_promises_that_the_tensors_of_errors_keep(words, capsys):
    assert cli.main([*ERRORS, *SMALL, "--heads", "1", "--tokens", "20", *words]) == 0


def test_help_names_each_form_of_the_packages_pages(monkeypatch, capsys):
    monkeypatch.setitem(algorithms.FORMS, "beta", ("sigmoid", "half_sigmoid"))
    monkeypatch.setenv("COLUMNS", "400")
    with pytest.raises(SystemExit):
        cli.main(["build", "--help"])
    said = "q=l2norm, k=l2norm|unit, g=linear|raw|bounded|safe|floored, beta=sigmoid|half_sigmoid, dt=softplus|rectified, "
    assert said in capsys.readouterr().out


# --- places ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("words, name, why", [
    (["build", "--target", "triton", "--out", "file"], "out", "File exists"),
    (["build", "--target", "triton", "--out", "/proc/x"], "out", "No such file or directory"),
    (["build", "--target", "triton", "--cached"], "GDN_CODEGEN_CACHE", "File exists"),
    (["verify", "--target", "triton", "--report", "file"], "report", "File exists"),
    *(([*way, *SMALL, f"--{name}", where], name, why) for way, name in ((PTO, "json"), (PTO, "trace"), (PTO, "plot"),
                                                                       (ERRORS, "json"))
      for where, why in (("/proc/x/y", "No such file or directory"), ("folder", "Is a directory"), ("file/x", "File exists"))),
    (["tune", "--target", "triton", "--out", "folder"], "out", "Is a directory")])
def test_places_that_cannot_be_written(words, name, why, tmp_path, monkeypatch, capsys):
    def worked(*a, **k):
        pytest.fail("it worked first")
    (tmp_path / "file").write_text("as it was")
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GDN_CODEGEN_CACHE", "file")
    for module, works in ((bench_pto, "stages"), (bench_errors, "problem"), (report, "reference_chunk"), (tune, "jobs")):
        monkeypatch.setattr(module, works, worked)
    monkeypatch.setattr(tune, "here", lambda: (("a GPU", "a kind"), "sm_90a", 132))
    assert refusal(words, capsys).startswith(f"{name}: got ")
    assert cli.main(words) == 2 and f": {why}; accepted: a f" in capsys.readouterr().err
    assert sorted(x.name for x in tmp_path.rglob("*")) == ["file", "folder"] and (tmp_path / "file").read_text() == "as it was"


@pytest.mark.slow
def test_parents_are_made(tmp_path):
    words = [*PTO, *SMALL, "--tokens", "16", "--heads", "1", "--blocks", "1", "--json", str(tmp_path / "a" / "b.json")]
    assert cli.main(words) == 0 and (tmp_path / "a" / "b.json").read_text().startswith("{")


def test_what_the_system_refuses_later_is_one_line(monkeypatch, capsys):
    def full(a):
        raise OSError(28, "No space left on device", "x.json")
    monkeypatch.setitem(cli.COMMANDS, "list", full)
    assert "No space left on device: 'x.json'" in refusal(["list"], capsys)


def test_a_reader_may_stop_reading():
    code = "import sys; sys.stdin.read(); from gdn_codegen.cli import main; sys.exit(main(['list']))"
    p = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                         text=True, cwd=ROOT)
    p.stdout.close()
    p.stdin.close()  # only now it writes
    assert (p.stderr.read(), p.wait()) == ("", 1)


# --- without torch ---------------------------------------------------------------------------------------------------
#: What needs no tensor: the words, and the exit status.
NO_TENSOR = [("--help", 0), ("build --help", 0), ("tune --help", 0), ("--version", 0), ("biuld", 2), ("build --targt", 2),
             ("build --schedule fusd", 2), ("build --algorithm gdn", 2), ("bench --heads 0", 2), ("list", 0)]


def test_what_needs_no_tensor_imports_no_torch():
    """In one process, one after the other: what is imported stays, so the first that imports torch is named."""
    code = ("import sys\nfrom gdn_codegen.cli import main\n"
            f"for words, wanted in {NO_TENSOR}:\n"
            "    try: status = main(words.split())\n    except SystemExit as e: status = e.code\n"
            "    assert (status, 'torch' in sys.modules) == (wanted, False), words")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_the_ops_bring_torch_and_nothing_that_takes_long_to_import():
    """Torch's compiler, the toolchains, passes, emitters, and what only examples and plots need come with their first use."""
    late = {"torch._dynamo", "torch._inductor", "triton", "tilelang", "tvm", "transformers", "matplotlib", "jinja2",
            "gdn_codegen.passes", "gdn_codegen.prove", "gdn_codegen.emit.triton"}
    code = f"import gdn_codegen.ops, sys; print(*({late} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert (done.stdout.strip(), done.returncode) == ("", 0), done.stderr


@pytest.mark.slow
def test_the_package_has_its_ops_all_the_same():
    code = ("import gdn_codegen, sys; assert 'torch' not in sys.modules and set(gdn_codegen.__all__) < set(dir(gdn_codegen))\n"
            "from gdn_codegen import *\nfrom gdn_codegen import ops\n"
            "assert gdn_codegen.chunk_gated_delta_rule is chunk_gated_delta_rule is ops.chunk_gated_delta_rule\n"
            "import torch; torch.ops.gdn_codegen.gated_delta_rule; sys.exit(hasattr(gdn_codegen, 'no_such_op'))")
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_version(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])
    assert ended.value.code == 0 and capsys.readouterr().out == f"gdn_codegen {gdn_codegen.__version__}\n"


# --- help ------------------------------------------------------------------------------------------------------------
def test_help_says_what_is_so(capsys):
    said = {}
    for command in ("build", "verify", "bench", "tune"):
        with pytest.raises(SystemExit):
            cli.main([command, "--help"])
        said[command] = " ".join(capsys.readouterr().out.split())
    assert {c for c, text in said.items() if "--check compiles for, joined" in text} == {"build"}
    assert f"serving.json (default: {len(SHAPES)})" in said["tune"]
    assert "what to emit (default: pto)" in said["bench"] and "(default: 128 for cycles of pto" in said["bench"]
