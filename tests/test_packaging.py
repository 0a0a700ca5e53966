"""What gets installed, and that the checkout's ``kernels/`` does not stand in the way of Hugging Face's ``kernels``."""

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Sequence
from email import message_from_bytes
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from sglang_freekv.releases import NEWEST, TESTED

ROOT = Path(__file__).resolve().parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SETUPTOOLS = PYPROJECT["tool"]["setuptools"]
DIRECTORIES = {package: SETUPTOOLS["package-dir"].get(package, package) for package in SETUPTOOLS["packages"]}

HUGGING_FACE = {  # stands in for the real distribution, which takes seconds to import
    "__init__.py": "from kernels.utils import get_kernel\n",
    "utils.py": "def get_kernel(): return 'from the hub'\n",
    "layer/__init__.py": "from ..utils import get_kernel\n",
}
USES = "from kernels import get_kernel; import kernels.layer, kernels.utils; print(kernels.__file__, get_kernel())"
SPAWNS = """
import multiprocessing
import sys

def path():
    from kernels import get_kernel
    return get_kernel() and sys.modules["kernels"].__file__

if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.apply(path))
"""


def python(*arguments: object, cwd: Path, path: Sequence[Path] = ()) -> subprocess.CompletedProcess:
    """Runs this interpreter as a user would: the current directory is on its ``sys.path``."""
    search = [*map(str, path), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(search)}
    environment.pop("PYTHONSAFEPATH", None)
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, env=environment, text=True, capture_output=True, timeout=300)


def output(*arguments: object, cwd: Path, path: Sequence[Path] = ()) -> str:
    done = python(*arguments, cwd=cwd, path=path)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture(scope="module")
def hugging_face(tmp_path_factory) -> Path:
    site = tmp_path_factory.mktemp("hugging_face")
    for name, source in HUGGING_FACE.items():
        (site / "kernels" / name).parent.mkdir(parents=True, exist_ok=True)
        (site / "kernels" / name).write_text(source)
    return site


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Built from a copy, since a build leaves files beside the sources."""
    copy, wheels = tmp_path_factory.mktemp("source") / "checkout", tmp_path_factory.mktemp("wheels")
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*", "build", "*.egg-info", "__pycache__"))
    output("-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", wheels, copy, cwd=wheels)
    [built] = wheels.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def site(wheel, tmp_path_factory) -> Path:
    """A directory that holds the installed wheel."""
    target = tmp_path_factory.mktemp("site")
    output("-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", target, wheel, cwd=target)
    return target


def test_every_source_directory_is_mapped():
    on_disk = {str(init.parent.relative_to(ROOT)) for folder in ("", "sglang_freekv/") for init in ROOT.glob(f"{folder}*/__init__.py")}
    assert set(DIRECTORIES.values()) == on_disk - {"benchmarks"}


def test_every_source_file_names_its_license():
    sources = [file for directory in (*DIRECTORIES.values(), "examples") for file in (ROOT / directory).glob("*.py")]
    assert len(sources) > len(DIRECTORIES)
    assert not [file for file in sources if not file.read_text().startswith("# SPDX-License-Identifier: Apache-2.0\n")]


def imported(*directories: str) -> set[str]:
    """Distributions that the files in some directories of the checkout import, wherever in them."""
    distributions, found = packages_distributions(), set()
    for file in (file for directory in directories for file in (ROOT / directory).rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and not node.level else []
            found |= {name.split(".")[0] for name in names}
    ours = {path.stem for directory in ("benchmarks", "examples", "tests", "launch/cpu_shim") for path in (ROOT / directory).rglob("*")}
    others = found - ours - set(sys.stdlib_module_names) - {"sglang_freekv", "benchmarks", "examples"}
    return {canonicalize_name(distributions.get(name, [name])[0]) for name in others}


def test_what_is_imported_is_declared():
    """SGLang brings it all, but may cease to."""
    declared = {canonicalize_name(Requirement(text).name) for text in PYPROJECT["project"]["dependencies"]}
    assert imported(*DIRECTORIES.values()) == declared
    extras = [text for texts in PYPROJECT["project"]["optional-dependencies"].values() for text in texts]
    assert imported("benchmarks", "examples", "tests") <= declared | {canonicalize_name(Requirement(text).name) for text in extras}


def test_every_release_that_is_tested_may_be_installed():
    [sglang] = [Requirement(text) for text in PYPROJECT["project"]["dependencies"] if Requirement(text).name == "sglang"]
    assert str(sglang.specifier) == f"<0.6,>={TESTED[0]}" and all(release in sglang.specifier for release in TESTED)


def test_commands_that_are_told_install_the_newest_release_that_is_tested():
    files = [
        file
        for folder in (*DIRECTORIES.values(), "benchmarks", "docs", "deploy", ".")
        for file in (ROOT / folder).glob("*.*")
        if file.suffix in (".py", ".md")
    ]
    told = {(file.name, release) for file in files for release in re.findall(r"\bsglang==([\d.]*\d)", file.read_text())}
    only_the_older_one_has_it = {("evaluators.py", "0.5.17")}
    assert ("_shadow.py", NEWEST) in told and {release for _, release in told - only_the_older_one_has_it} == {NEWEST}


def test_the_scripts_read_which_releases_are_tested():
    read = "source launch/environments.sh && echo ${tested[*]} && for release in ${tested[*]}; do environment_of $release; done"
    done = subprocess.run(["bash", "-euc", read], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [" ".join(TESTED), *(f".venv-{release}" for release in TESTED[:-1]), ".venv"]


def test_a_release_that_is_not_tested_is_not_installed():
    done = subprocess.run(["bash", "launch/setup.sh", "0.5.20"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.startswith(
        f"setup: SGLang 0.5.20: expected one of the tested releases, which are {TESTED[0]}"
    )


def test_the_tree_is_small_enough_to_be_moved():
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("no repository to ask")
    sizes = {name: (ROOT / name).lstat().st_size for name in filter(None, listed.stdout.split("\0")) if (ROOT / name).exists()}
    assert sum(sizes.values()) <= 30 << 20, sorted(sizes, key=sizes.get)[-10:]


def test_files_that_the_sources_name_exist():
    sources = [file.read_text() for directory in DIRECTORIES.values() for file in (ROOT / directory).glob("*.py")]
    named = {name for text in sources for name in re.findall(r"\b(?:benchmarks|docs)/[\w./-]+\.\w+\b", text)}
    assert "benchmarks/results/bench_recall.json" in named
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


def test_wheel_holds_the_sources_and_their_data_and_nothing_else(wheel):
    expected = set()
    for package, directory in DIRECTORIES.items():
        for pattern in ("*.py", *SETUPTOOLS["package-data"].get(package, ())):
            files = (ROOT / directory).glob(pattern)
            expected |= {f"{package.replace('.', '/')}/{file.relative_to(ROOT / directory).as_posix()}" for file in files}
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert names == expected
    assert names >= {"sglang_freekv/py.typed", "sglang_freekv/launch/cpu_shim/sgl_kernel/__init__.py"}


def test_wheel_names_the_plugin_its_version_and_its_license(wheel):
    archive = zipfile.ZipFile(wheel)
    [info] = {name.split("/")[0] for name in archive.namelist() if ".dist-info/" in name}
    entries = archive.read(f"{info}/entry_points.txt").decode()
    assert "[sglang.srt.plugins]\nfreekv = sglang_freekv.plugin:register" in entries
    assert "[console_scripts]\nfreekv-doctor = sglang_freekv.launch.doctor:main" in entries
    metadata = message_from_bytes(archive.read(f"{info}/METADATA"))
    version = output("-c", "import sglang_freekv; print(sglang_freekv.__version__)", cwd=ROOT)
    assert (metadata["Name"], metadata["Version"], metadata["License-Expression"]) == ("sglang-freekv", version, "Apache-2.0")
    assert archive.read(f"{info}/licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()


def test_installed_wheel_imports_outside_the_checkout(site, tmp_path):
    modules = [f"{package}.config" if package == "sglang_freekv" else package for package in DIRECTORIES]
    code = f"import {', '.join(modules)}; print(sglang_freekv.kernels.__file__)"
    assert Path(output("-c", code, cwd=tmp_path, path=[site])).parent == site / "sglang_freekv" / "kernels"


def test_installed_doctor_answers_outside_the_checkout(site, tmp_path):
    script = site / "bin" / "freekv-doctor"
    assert output("-c", f"exec(open({str(script)!r}).read())", "--help", cwd=tmp_path, path=[site]).startswith("usage: freekv-doctor")


def test_editable_install_imports_the_checkout_from_anywhere(tmp_path):
    code = "import sglang_freekv.kernels; print(sglang_freekv.kernels.__file__)"
    for directory in (ROOT, tmp_path):
        assert Path(output("-c", code, cwd=directory)) == ROOT / "kernels" / "__init__.py"


@pytest.mark.parametrize("install", ["editable", "wheel"])
@pytest.mark.parametrize("place", ["checkout", "elsewhere"])
def test_kernels_is_hugging_faces(place, install, hugging_face, site, tmp_path):
    path = [site, hugging_face] if install == "wheel" else [hugging_face]
    directory = ROOT if place == "checkout" else tmp_path
    real = hugging_face / "kernels" / "__init__.py"
    assert output("-c", USES, cwd=directory, path=path) == f"{real} from the hub"


def test_kernels_is_hugging_faces_in_a_spawned_child(hugging_face, tmp_path):
    (tmp_path / "spawns.py").write_text(SPAWNS)
    path = [ROOT, tmp_path, hugging_face]
    assert output("-m", "spawns", cwd=ROOT, path=path) == str(hugging_face / "kernels" / "__init__.py")


def test_kernels_hands_over_past_a_second_checkout(hugging_face, tmp_path):
    (tmp_path / "kernels").mkdir()
    for name in ("__init__.py", "_shadow.py"):
        shutil.copy(ROOT / "kernels" / name, tmp_path / "kernels")
    assert output("-c", USES, cwd=ROOT, path=[tmp_path, hugging_face]) == f"{hugging_face / 'kernels' / '__init__.py'} from the hub"


def test_kernels_is_absent_without_hugging_faces():
    done = python("-S", "-E", "-c", "import kernels", cwd=ROOT)
    assert done.returncode == 1
    assert "ModuleNotFoundError: No module named 'kernels': expected Hugging Face's `kernels`, which SGLang installs" in done.stderr


def test_server_starts_in_the_checkout():
    assert "--kv-retrieval" in output("-m", "sglang.launch_server", "--help", cwd=ROOT)
