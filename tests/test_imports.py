"""Imports point one way, and what decides and what moves bytes knows nothing of SGLang."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

LAYERS = (  # a module imports from its own line and from those above
    ("__init__", "architectures", "methods", "presets", "refusal", "layer_taus", "config", "layers"),
    ("kernels", "batch", "counts", "flag", "metrics"),
    ("lending", "memory_pool"),
    ("closing", "digests", "extend_plan", "options", "policy", "residency", "schedule"),
    ("engine", "decode_step", "retrieval"),
    ("rehearsal",),
    ("releases",),
    ("kv_pool", "windowed_pool", "cpu_attention"),
    ("backend",),
    ("scheduler_patch",),
    ("plugin",),
    ("launch",),
)
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}
USES_SGLANG = {"kv_pool", "windowed_pool", "cpu_attention", "backend", "scheduler_patch", "plugin", "launch"}

FILES = sorted(ROOT.glob("sglang_freekv/*.py"))
FILES += sorted(file for name in RANK for folder in (name, f"sglang_freekv/{name}") for file in ROOT.glob(f"{folder}/*.py"))


def module_of(file: Path) -> str:
    """The dotted name that the file is installed under."""
    parts = file.relative_to(ROOT).with_suffix("").parts
    parts = parts if parts[0] in ("sglang_freekv", "benchmarks") else ("sglang_freekv", *parts)
    return ".".join(parts).removesuffix(".__init__")


def layer_of(module: str) -> str:
    return [*module.split("."), "__init__"][1]


def imports_of(file: Path) -> Iterator[str]:
    """Absolute dotted names of everything the file imports, wherever in it; ``from a import b`` may name a module ``a.b``."""
    package = module_of(file).split(".")[: None if file.name == "__init__.py" else -1]
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{base}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_imports_point_one_way(file):
    layer = layer_of(module_of(file))
    assert layer in RANK, f"{file.name} is new: give {layer!r} its place in LAYERS"
    for imported in imports_of(file):
        top = imported.split(".")[0]
        if top == "sglang":
            assert layer in USES_SGLANG, f"imports {imported}, but only {sorted(USES_SGLANG)} may import sglang"
        elif top == "sglang_freekv":
            target = layer_of(imported)
            assert RANK.get(target, 0) <= RANK[layer], f"imports {imported}, which lies above {layer}"


def test_benchmarks_import_in_no_circle():
    files = {module_of(file): file for file in (ROOT / "benchmarks").rglob("*.py")}
    names = {module: (name if name in files else name.rpartition(".")[0] for name in imports_of(file)) for module, file in files.items()}
    TopologicalSorter({module: files.keys() & set(imported) - {module} for module, imported in names.items()}).prepare()


def test_most_of_the_package_imports_without_sglang():
    modules = [module_of(file) for file in FILES if layer_of(module_of(file)) not in USES_SGLANG]
    code = "import sys; sys.modules['sglang'] = None; " + "; ".join(f"import {module}" for module in modules)
    done = subprocess.run([sys.executable, "-P", "-c", code], cwd=ROOT, text=True, capture_output=True, timeout=300)
    assert done.returncode == 0, done.stderr


def test_the_package_itself_costs_nothing_to_import():
    code = "import sys; before = set(sys.modules); import sglang_freekv; print(*sorted(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-P", "-c", code], text=True, capture_output=True, timeout=300, check=True)
    assert "torch" not in done.stdout.split() and "sglang" not in done.stdout.split()
