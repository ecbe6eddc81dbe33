"""Who may import whom, as docs and design have it; read from the source, so that imports inside functions count too.

And how long a file may be.
"""

import ast
import functools
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "nanovllm"
# These know nothing of ours but each other's plain helpers; everybody may import them.
LEAVES = {
    "config", "console", "model_config",
    "arguments", "field_docs", "foreign_arguments", "foreign_names", "garbage_collector", "json_output",
    "sampling_params", "outputs", "structured_outputs", "early_exit", "environment", "loading_line", "log_format",
    "quiet_import", "status_process", "wording",
}  # fmt: skip
ALLOWED = {
    "hardware": set(),
    "distributed": set(),
    "kernels": {"hardware"},
    "layers": {"kernels", "distributed"},
    "models": {"kernels", "layers"},
    "weights": {"kernels", "layers", "models"},
    "structured": {"weights"},
    "engine": {"distributed", "hardware", "kernels", "layers", "models", "structured", "weights"},
    "chat": set(),
    "frontend": {"distributed", "engine", "weights"},
    "llm": {"engine", "frontend", "chat"},
    "async_llm": {"engine", "frontend", "weights"},
    "serve": {"async_llm", "engine", "frontend", "chat", "weights", "__init__"},
    "adapters": {"kernels"},
    "bench": {"kernels", "hardware"},
    "plan": {"kernels", "hardware"},
    "fuse": {"kernels", "hardware", "plan"},
    "tune": {"kernels", "hardware"},
    "lab": {"kernels", "hardware"},
    "cli": {
        "chat", "engine", "frontend", "llm", "async_llm", "serve", "models", "weights", "kernels", "hardware", "bench",
        "plan", "fuse", "tune", "lab", "adapters",
    },
    "__main__": {"cli"},
    "__init__": {"llm", "async_llm"},
}  # fmt: skip
# A second or more to import, and not needed to serve token ids or to show a help text.
HEAVY = {"transformers", "rich", "tokenizers", "huggingface_hub", "gguf"}
WITHOUT_TORCH = {
    "serve.process_client", "engine.sequence", "engine.block_manager", "engine.scheduler",
    "engine.requests.detokenizer", "engine.requests.prompts", "structured.constraint",
}  # fmt: skip


def module_name(path):
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


MODULES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def is_type_checking(node):
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


@functools.cache
def imports(name):
    """(imported module, whether it is at the top level) for every import of a module; those of TYPE_CHECKING do not
    count.
    """
    path = MODULES[name]
    package = ["nanovllm", *path.relative_to(PACKAGE).parts[:-1]]

    def walk(node, top):
        for child in ast.iter_child_nodes(node):
            if is_type_checking(child):
                continue
            if isinstance(child, ast.Import):
                yield from ((alias.name, top) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                base = package[: len(package) - child.level + 1] if child.level else []
                module = ".".join([*base, *([child.module] if child.module else [])])
                # `from package import module` imports the module; `from module import name` the module that has the
                # name.
                for alias in child.names:
                    full = f"{module}.{alias.name}"
                    yield (full if full.removeprefix("nanovllm.") in MODULES else module), top
            yield from walk(child, top and not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)))

    return list(walk(ast.parse(path.read_text()), True))


def part(name):
    """The part of the package that a module belongs to: "engine" for nanovllm.engine.batch, "llm" for nanovllm.llm."""
    return name.removeprefix("nanovllm").lstrip(".").split(".")[0] or "__init__"


def ours(name):
    return [imported for imported, _ in imports(name) if imported.split(".")[0] == "nanovllm"]


def test_the_modules_are_found():
    assert set(MODULES) >= {"llm", "config", "engine", "engine.scheduler", "kernels.ops.norm", "__main__"}
    assert "nanovllm.kernels.op.dispatch" in ours("kernels.ops.norm") and ("torch", True) in imports("engine.batch")
    assert ("nanovllm.llm", False) in [i for m in MODULES for i in imports(m)]  # imports in functions are seen


def may_import(own):
    if own in LEAVES:
        return LEAVES
    assert own in ALLOWED, f"{own} is new: say here and in the design what it may import"
    return LEAVES | ALLOWED[own] | {own} | ({"__init__"} if own in ("cli", "__main__") else set())  # LLM, the version


def test_who_imports_whom():
    wrong = [
        f"nanovllm.{name} imports {imported}"
        for name in MODULES
        for imported in ours(name)
        if part(imported) not in may_import(part(name))
    ]
    assert not wrong, "\n".join(wrong)


def circles(graph):
    """The strongly connected components of more than one module (Tarjan's algorithm)."""
    order, low, stack, found = {}, {}, [], []

    def visit(module):
        order[module] = low[module] = len(order)
        stack.append(module)
        for imported in graph[module]:
            if imported not in order:
                visit(imported)
            if imported in stack:
                low[module] = min(low[module], low[imported])
        if low[module] == order[module]:
            cut = stack.index(module)
            if len(stack) > cut + 1:
                found.append(sorted(stack[cut:]))
            del stack[cut:]

    for module in graph:
        if module not in order:
            visit(module)
    return found


def test_no_circle_of_imports():
    assert circles({"a": ["b"], "b": ["c"], "c": ["b", "d"], "d": ["e"], "e": []}) == [["b", "c"]]
    short = {module: [name.removeprefix("nanovllm").lstrip(".") for name in ours(module)] for module in MODULES}
    graph = {m: [name for name in names if name in MODULES and name != m] for m, names in short.items()}
    assert not circles(graph), "\n".join(map(", ".join, circles(graph)))


def test_the_engine_knows_its_fast_paths_by_one_interface():
    fast = "nanovllm.engine.fast."
    knows = {
        (name, imported.removeprefix(fast))
        for name in MODULES
        for imported in ours(name)
        if imported.startswith(fast) and not name.startswith("engine.fast")
    }
    assert knows == {("engine.model_runner", "paths")}


def test_slow_packages_are_imported_where_they_are_used():
    heavy = {
        f"nanovllm.{name} imports {imported} at its top"
        for name in MODULES
        for imported, top in imports(name)
        if top and imported.split(".")[0] in HEAVY
    }
    assert not heavy, "\n".join(sorted(heavy))


@pytest.mark.parametrize("name", sorted(WITHOUT_TORCH))
def test_no_torch_in_what_decides(name):
    seen, todo = set(), [name]
    while todo:
        module = todo.pop()
        if module in seen or module not in MODULES:
            continue
        seen.add(module)
        assert "torch" not in {imported.split(".")[0] for imported, _ in imports(module)}, module
        todo += [imported.removeprefix("nanovllm").lstrip(".") or "__init__" for imported in ours(module)]


@pytest.mark.parametrize(
    "statement, absent",
    [
        ("import nanovllm, nanovllm.cli", ["torch", "numpy", "transformers", "rich", "triton", "gguf"]),
        ("from nanovllm import SamplingParams; import nanovllm.engine.scheduler, nanovllm.chat", ["torch", "typer"]),
    ],
)
def test_what_an_import_brings_along(statement, absent):
    code = f"import sys; {statement}; print([m for m in {absent} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=PACKAGE.parent)
    assert done.stdout.strip() == "[]"


def test_an_engine_needs_no_typer():
    """Nor what no module imports at its top: see `test_slow_packages_are_imported_where_they_are_used`."""
    seen, todo = set(), ["llm", "async_llm", "frontend.engine_client"]
    while todo:
        if (module := todo.pop()) in MODULES and module not in seen:
            seen.add(module)
            at_top = [imported for imported, top in imports(module) if top]
            assert "typer" not in {imported.split(".")[0] for imported in at_top}, module
            todo += [imported.removeprefix("nanovllm").lstrip(".") or "__init__" for imported in at_top]
    assert {"engine.llm_engine", "kernels.ops.sample"} <= seen


def test_no_pickle_anywhere():
    for name in MODULES:
        names = {imported.split(".")[0] for imported, _ in imports(name)}
        assert not names & {"pickle", "dill", "joblib", "shelve"}, name
        assert "torch.load" not in MODULES[name].read_text(), name


def test_no_file_of_python_has_more_than_350_lines():
    root = PACKAGE.parent
    files = [path for folder in ("nanovllm", "tests", "benchmarks", "docs") for path in (root / folder).rglob("*.py")]
    lengths = {path: path.read_bytes().count(b"\n") for path in [*files, *root.glob("*.py")]}
    assert len(lengths) > 500
    assert {str(path.relative_to(root)): n for path, n in lengths.items() if n > 350} == {}
