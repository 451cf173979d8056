"""The wheel carries templates and simulator headers, and works where the sources are not."""
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import gdn_codegen

ROOT = Path(__file__).parents[2]
#: Hosts that pip installs, and that have a plug-in.
HOSTS = {"fla", "transformers", "vllm", "sglang", "megatron", "torchtitan"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    pytest.importorskip("hatchling", reason="building the wheel offline needs hatchling, which the test extra brings")
    out = tmp_path_factory.mktemp("wheel")
    subprocess.run([sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(out), str(ROOT)],
                   check=True, capture_output=True, text=True)
    (path,) = out.glob("*.whl")
    return path


def test_what_is_inside(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    inside = {f"gdn_codegen/templates/{p.relative_to(ROOT / 'templates')}" for p in (ROOT / "templates").rglob("*.j2")}
    sources = (p for p in (ROOT / "gdn_codegen").rglob("*") if p.is_file() and "__pycache__" not in p.parts)
    inside |= {str(p.relative_to(ROOT)) for p in sources}
    assert inside <= names, inside - names
    assert any(n.endswith("licenses/LICENSE") for n in names)
    assert not [n for n in names if n.startswith(("tests", "generated"))]


def test_the_core_needs_torch_and_jinja2_alone(wheel):
    meta = next(n for n in zipfile.ZipFile(wheel).namelist() if n.endswith("METADATA"))
    requires = [x for x in zipfile.ZipFile(wheel).read(meta).decode().splitlines() if x.startswith("Requires-Dist")]
    assert sorted(x.split()[1].split(">")[0] for x in requires if "extra ==" not in x) == ["jinja2", "torch"]


def test_each_host_has_an_extra_and_the_version_is_one(wheel):
    archive = zipfile.ZipFile(wheel)
    meta = archive.read(next(n for n in archive.namelist() if n.endswith("METADATA"))).decode()
    extras = set(re.findall(r"^Provides-Extra: (.+)$", meta, re.M))
    plug_ins = {p.stem for p in (ROOT / "gdn_codegen" / "integrations").iterdir()}
    assert extras - {"triton", "tilelang", "bench", "examples", "test"} == HOSTS and HOSTS <= plug_ins
    assert f"\nVersion: {gdn_codegen.__version__}\n" in meta
    assert f"## {gdn_codegen.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_the_description_has_no_relative_link(wheel):
    """A package index shows README.md where its neighbours are not."""
    archive = zipfile.ZipFile(wheel)
    meta = archive.read(next(n for n in archive.namelist() if n.endswith("METADATA"))).decode()
    source = next(x.split(", ")[1] for x in meta.splitlines() if x.startswith("Project-URL: Source"))
    links = re.findall(r"\]\(([^)]+)\)", meta)
    ours = [x.removeprefix(f"{source}/blob/main/").removeprefix(f"{source}/raw/main/").split("#")[0]
            for x in links if x.startswith(source)]
    assert ours and all((ROOT / x).is_file() for x in ours), ours
    assert [x for x in links if not x.startswith("https://")] == []
    assert "Classifier: Typing :: Typed" in meta and "gdn_codegen/py.typed" in archive.namelist()


@pytest.mark.slow
def test_an_install_elsewhere_builds(wheel, tmp_path):
    site = tmp_path / "site"
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(site), str(wheel)], check=True)
    code = ("import sys; sys.path.insert(0, sys.argv[1]); import gdn_codegen; from gdn_codegen.cli import main\n"
            "assert gdn_codegen.__file__.startswith(sys.argv[1]), gdn_codegen.__file__\n"
            "sys.exit(main(['build', '--target', 'all', '--out', 'mine']))\n")
    done = subprocess.run([sys.executable, "-c", code, str(site)], cwd=tmp_path, capture_output=True, text=True,
                          env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    assert list((tmp_path / "mine").rglob("gdn_c64_bthd.py"))


def test_the_package_runs_as_a_module():
    """As the command, with its status and output; a script's folder may not be on the PATH."""
    done = subprocess.run([sys.executable, "-m", "gdn_codegen", "list", "nothing"], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stdout) == (2, "") and done.stderr.startswith("usage: gdn_codegen "), done.stderr
    done = subprocess.run([sys.executable, "-m", "gdn_codegen", "--version"], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0 and done.stdout.startswith("gdn_codegen ")


def test_importing_the_package_imports_no_target():
    code = ("import sys, gdn_codegen.cli\n"
            "print([m for m in ('triton', 'tilelang', 'torch_npu', 'transformers') if m in sys.modules])")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"


def test_the_minimum_run_takes_the_oldest_that_are_promised():
    """.ci/minimum reads pyproject.toml, and nothing older is said to do than what the tests were last run with."""
    line = next(x for x in (ROOT / ".ci" / "minimum").read_text().splitlines() if x.startswith("oldest()"))
    def said(n):
        done = subprocess.run(["bash", "-c", f"{line}; oldest {n}"], cwd=ROOT, capture_output=True, text=True, check=True)
        return done.stdout.strip()
    oldest = [said(n) for n in ("torch", "jinja2", "tilelang", "triton")]
    assert [x.partition("==")[0] for x in oldest] == ["torch", "jinja2", "tilelang", "triton"]
    pinned = dict(x.split("==") for x in (ROOT / "constraints.txt").read_text().splitlines() if "==" in x)
    for name, _, version in (x.partition("==") for x in oldest if x.partition("==")[0] in pinned):
        assert tuple(map(int, version.split("."))) <= tuple(map(int, pinned[name].split("."))), name
