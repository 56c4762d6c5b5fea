"""The map: who may import what, how long a file is, and what a plan must not load."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import kimicap

FILES = sorted(Path(kimicap.__file__).parent.glob("*.py"))
LONGEST_LINES = 360

ALLOWED = {
    "torch": "assembly attention attention_triton callsites check compared computed copies first_batch forwards hooks "
    "invariants kda kda_chunks kda_triton notebook odd pieces reading recomputed rows session slots taken writers",
    "triton": "attention_triton kda_triton",
    "zarr": "arrays",
    "tensorstore": "shards store",
    "yaml": "config schema",
    "pydantic": "config",
    "typer": "cli flags",
    "click": "cli",
    "rich": "cli report",
    "matplotlib": "plots",
    "transformers": "",
    "datasets": "",
    "xarray": "",
    "fla": "",
}
"""Files that may import a library at module level."""

ALLOWED_INSIDE = {
    "transformers": "models hooks check",
    "datasets": "batches",
    "xarray": "arrays store plots",
    "torch": "models run cluster",
    "matplotlib": "plots",
    "rich": "cli report",
}
"""Files that may import a library inside a function, beyond those above."""


def imports_of(file: Path, *, top: bool) -> set[str]:
    """Top-level names of the packages that a file imports: at module level, or inside functions."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    inside = {
        child
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or _is_for_types(node)
        for child in ast.walk(node)
    }
    found = set()
    for node in ast.walk(tree):
        if (node in inside) == top:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.split(".")[0])
    return found


def _is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_the_map_of_imports(file):
    at_top = {name for name in imports_of(file, top=True) if name in ALLOWED and file.stem not in ALLOWED[name].split()}
    assert not at_top, f"{file.name} imports {at_top} at module level"
    # type checkers' imports cost nothing at run time, so only torch and those of functions are told apart here
    heavy = {"transformers", "datasets", "matplotlib", "rich", "typer", "pydantic", "zarr", "tensorstore"}
    inside = {
        name
        for name in imports_of(file, top=False) & heavy
        if file.stem not in f"{ALLOWED.get(name, '')} {ALLOWED_INSIDE.get(name, '')}".split()
    }
    assert not inside, f"{file.name} imports {inside} inside a function"


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_files_are_small_and_quiet(file):
    text = file.read_text(encoding="utf-8")
    assert file.stem not in ("utils", "util", "helpers", "misc", "common")
    assert len(text.splitlines()) <= LONGEST_LINES
    calls = [node.func for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    printing = [call for call in calls if isinstance(call, ast.Name) and call.id == "print"]
    assert not printing or file.stem in ("cli", "report")


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_no_function_swallows_arguments(file):
    tree = ast.parse(file.read_text(encoding="utf-8"))
    public = [
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.args.kwarg and not node.name.startswith("_")
    ]
    wrappers = {"hooks", "forwards"}  # stand in for functions of the model, whatever those take
    assert not public or file.stem in wrappers | {"cli"}, public


def test_a_plan_loads_neither_torch_nor_transformers_nor_datasets():
    code = (
        "import sys, kimicap.prepare, kimicap.run, kimicap.schema\n"
        "print(*sorted({'torch', 'transformers', 'datasets', 'matplotlib', 'xarray'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_the_design_names_files_and_tests_that_there_are():
    root = Path(__file__).parents[1]
    text = (root / "docs" / "design.md").read_text(encoding="utf-8")
    told = set(re.findall(r"`(\w+\.py)`", text.partition("## The map")[2].partition("## One batch")[0]))
    assert {file.name for file in FILES} - told == {"__init__.py", "__main__.py", "_version.py"}
    assert told <= {file.name for file in FILES}
    tests = "".join(file.read_text(encoding="utf-8") for file in root.glob("tests/test_*.py"))
    named = set(re.findall(r"`(test_\w+)`", text))
    assert named
    assert {name for name in named if f"def {name}(" not in tests} == set()
