"""The project as a whole: who may import whom, names that must not clash, what the wheel holds, what files may say."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from fnmatch import fnmatch
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {"fastgrpo": ROOT / "fastgrpo", "fastgrpo_kernels": ROOT / "kernels" / "fastgrpo_kernels"}
KERNELS_USER = "fastgrpo.policy.head"

# What each part of fastgrpo may import: parts on the lines above its own (and its own modules). A line's parts do not
# know each other. `fastgrpo` itself, the package's __init__, imports the trainer only when a user asks for it.
LAYERS = [
    {"errors", "clock", "flops", "fastgrpo", "torchrun", "whereabouts", "redact", "host_memory"},
    {"config", "records", "paths", "rows"},
    {"console", "hub", "mesh", "algorithm", "batch", "compose"},
    {"beats", "diff", "launch", "metrics", "stopping"},
    {"groups", "outage", "val_metrics", "watchdog"},
    {"policy", "reward", "data", "gate", "plan", "best_metric"},
    {"rollout", "checkpoint", "gpu"},
    {"evaluate", "dump", "final_save"},
    {"history", "provenance", "run_files"},
    {"report", "summary"},
    {"stages"},
    {"session"},
    {"trainer"},
    {"train"},
]
# Third parties that only one place may import (a module, a package, or modules whose names begin like this_).
ONLY_HOME = {
    "vllm": ("fastgrpo.rollout.vllm.", "fastgrpo.rollout.vllm_"),
    "hydra": ("fastgrpo.compose.",),
    "triton": ("fastgrpo_kernels.",),
}


def modules() -> Iterator[tuple[str, Path]]:
    for package, folder in PACKAGES.items():
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            yield ".".join((package, *parts)).removesuffix(".__init__"), path


NAMES = {name for name, _ in modules()}


def imports(path: Path) -> set[str]:
    """Every module that a file imports anywhere in it; `from fastgrpo import hub` counts as fastgrpo.hub."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"{path}:{node.lineno}: relative import"
            candidates = {f"{node.module}.{alias.name}" for alias in node.names}
            found.update((candidates & NAMES) or {node.module})
    return found


def part(module: str) -> str:
    """`policy` for fastgrpo.policy.head; `fastgrpo` for the package itself."""
    return module.split(".")[1] if "." in module else module


def test_imports_point_one_way() -> None:
    height = {name: i for i, layer in enumerate(LAYERS) for name in layer}
    sources = [(name, path) for name, path in modules() if name.startswith("fastgrpo.")]
    assert {part(name) for name, _ in sources} <= set(height), "a new part: give it its place in LAYERS"
    upward = [
        f"{name} -> {target}"
        for name, path in sources
        for target in imports(path)
        if target.split(".")[0] == "fastgrpo"
        and part(target) != part(name)
        and height[part(target)] >= height[part(name)]
    ]
    assert upward == []


def test_kernels_stand_alone_and_have_one_user() -> None:
    users = {name for name, path in modules() for target in imports(path) if target.startswith("fastgrpo_kernels")}
    assert {name for name in users if not name.startswith("fastgrpo_kernels")} == {KERNELS_USER}
    roots = {
        target.split(".")[0]
        for name, path in modules()
        if name.startswith("fastgrpo_kernels")
        for target in imports(path)
    }
    assert roots - set(sys.stdlib_module_names) <= {"torch", "triton", "fastgrpo_kernels"}


def test_third_parties_stay_in_their_homes() -> None:
    strays = [
        f"{name} imports {target}"
        for name, path in modules()
        for target in imports(path)
        if (homes := ONLY_HOME.get(target.split(".")[0])) and not f"{name}.".startswith(homes)
    ]
    assert strays == []


def test_every_import_is_a_declared_dependency() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    lines = project["dependencies"] + [line for name in extras if name != "dev" for line in extras[name]]
    declared = {_normal(re.split(r"[<>=; \[]", line)[0]) for line in lines} | {"triton"}  # torch brings triton
    providers = packages_distributions()
    missing = {
        f"{name} imports {root}"
        for name, path in modules()
        for root in {target.split(".")[0] for target in imports(path)} - at_home(path)
        if declared.isdisjoint(_normal(provider) for provider in [root, *providers.get(root, [])])
    }
    assert missing == set()


def at_home(path: Path) -> set[str]:
    """What may be imported without a dependency. Scripts of the sandbox know no package, only their neighbours."""
    neighbours = {script.stem for script in path.parent.glob("*.py")} if path.parent.name == "sandbox" else set()
    return set(sys.stdlib_module_names) | set(PACKAGES) | neighbours


def _normal(distribution: str) -> str:
    return re.sub(r"[-_.]+", "-", distribution).lower()


def test_every_module_says_what_it_is() -> None:
    folders = [*PACKAGES.values(), ROOT / "bench", ROOT / "tests", ROOT / "tools"]
    paths = [path for folder in folders for path in folder.rglob("*.py")]
    assert len(paths) > len(NAMES)
    assert [str(path) for path in paths if not ast.get_docstring(ast.parse(path.read_text()))] == []


def test_no_file_names_a_machine_or_a_registry() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    # Put together from pieces, so that this file does not contain what it forbids.
    folders = "|".join(("wo" + "rk", "ro" + "ot", "tmp/d" + "ev", re.escape(str(Path.home()).lstrip("/")) or "-"))
    hosts = ("py" + r"pi\.org", "pytho" + "nhosted", "npm" + r"js\.org", "de" + r"bian\.org", r"download\.py" + "torch")
    # A path or host at the start of a word; and any address of a package index, whoever serves it.
    forbidden = re.compile(
        rf"(?<![\w./-])/({folders})/|{'|'.join(hosts)}|https?://[^\s\"'`)]*/(sim" + r"ple|whl)(/|\b)", re.IGNORECASE
    )
    found = []
    for name in filter(None, names):
        path = ROOT / name
        if path.is_file() and b"\0" not in (content := path.read_bytes()):
            found += [f"{name}: {line}" for line in content.decode().splitlines() if forbidden.search(line)]
    assert found == []


def test_bare_kernels_folder_is_no_package(tmp_path: Path) -> None:
    """transformers probes for Hugging Face's `kernels`, and `python -m` puts our folder of that name on the path."""
    assert not (ROOT / "kernels" / "__init__.py").exists()
    (tmp_path / "probe.py").write_text(
        "import sys, importlib.util\n"
        "from transformers import AutoModelForCausalLM\n"
        "spec = importlib.util.find_spec('kernels')\n"
        "print(sys.path[0], None if spec is None else spec.origin, sep='\\n')\n"
    )
    done = run([sys.executable, "-m", "probe"], cwd=ROOT, PYTHONPATH=str(tmp_path))
    assert done.returncode == 0, done.stderr
    path, origin = done.stdout.splitlines()[-2:]
    assert Path(path) == ROOT
    assert origin == "None" or not Path(origin).is_relative_to(ROOT / "kernels")


@pytest.mark.parametrize("version", ["3.9", "2.7", None])
def test_set_up_asks_for_a_newer_python(tmp_path: Path, version: str | None) -> None:
    checkout, commands = tmp_path / "checkout", tmp_path / "bin"
    (checkout / "tools").mkdir(parents=True)
    commands.mkdir()
    for name in ("Makefile", "pyproject.toml", "tools/setup.sh"):
        shutil.copy(ROOT / name, checkout / name)
    for name in ("make", "sh", "bash", "env", "dirname", "rm", "mkdir", "touch"):
        (commands / name).symlink_to(shutil.which(name) or pytest.fail(f"no {name}"))
    if version:
        (commands / "python3").write_text(f"#!/bin/sh\necho {version.replace('.', ' ')}\n")
        (commands / "python3").chmod(0o755)
    done = run(["make", "test"], cwd=checkout, PATH=str(commands), PYTHON="")
    assert done.returncode != 0
    assert "fastgrpo needs Python 3.11 or newer." in done.stderr
    assert (f"python3 is {version}." if version else "No Python was found.") in done.stderr
    assert "make test PYTHON=" in done.stderr  # the remedy
    assert not (checkout / ".venv").exists()


def test_wheel_holds_the_packages_and_their_configs(tmp_path: Path) -> None:
    """Built, installed apart from this checkout, and asked from a third folder."""
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    build = run([*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(tmp_path), str(ROOT)])
    assert build.returncode == 0, build.stderr
    (wheel,) = tmp_path.glob("fastgrpo-*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"fastgrpo", "fastgrpo_kernels"}
    for source, place in (("fastgrpo", "fastgrpo"), ("kernels/fastgrpo_kernels", "fastgrpo_kernels")):
        modules_here = {path.relative_to(ROOT / source).as_posix() for path in (ROOT / source).rglob("*.py")}
        assert {f"{place}/{name}" for name in modules_here} <= names
    configs = {path.relative_to(ROOT).as_posix() for path in (ROOT / "configs").rglob("*") if path.is_file()}
    assert "configs/exp/quickstart.yaml" in configs
    assert {f"fastgrpo/{name}" for name in configs} <= names

    site, elsewhere = tmp_path / "site", tmp_path / "elsewhere"
    elsewhere.mkdir()
    install = run([*pip, "install", "--no-deps", "--target", str(site), str(wheel)])
    assert install.returncode == 0, install.stderr
    probe = "import fastgrpo, fastgrpo_kernels; print(fastgrpo.__file__, fastgrpo.__version__)"
    where = run([sys.executable, "-c", probe], cwd=elsewhere, PYTHONPATH=str(site))
    assert where.stdout.split() == [str(site / "fastgrpo" / "__init__.py"), wheel.name.split("-")[1]]
    listing = run([sys.executable, "-m", "fastgrpo.train", "--help"], cwd=elsewhere, PYTHONPATH=str(site))
    assert listing.returncode == 0, listing.stderr
    experiments = [path.stem for path in (ROOT / "configs" / "exp").glob("*.yaml")]
    assert [name for name in experiments if name not in listing.stdout + listing.stderr] == []


def run(command: list[str], cwd: Path = ROOT, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=cwd, env=os.environ | environ, capture_output=True, text=True, timeout=300, check=False
    )


def test_no_folder_of_tests_is_passed_over(request: pytest.FixtureRequest) -> None:
    """pytest skips folders by name, `dist` among them unless told otherwise, and says nothing."""
    passed_over = request.config.getini("norecursedirs")
    folders = [path for path in (ROOT / "tests").rglob("*") if path.is_dir() and any(path.glob("test_*.py"))]
    assert {"unit", "kernels", "dist", "e2e"} <= {folder.name for folder in folders}
    assert not [folder for folder in folders for pattern in passed_over if fnmatch(folder.name, pattern)]
