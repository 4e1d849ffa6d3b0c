"""Who may import whom: every import of the package against one table, and what only the edges may do.

    4  edges          answers, api_server, bench, cli, demo, export, fetch, http_connection, http_edge, live, live_server,
                      llm, metrics, protocol, replay, text_endpoints, top, trace, __init__, __main__
    3  engine         async_engine, chat_template, detokenizer, engine, structured, tokenizer, tokenizer_files, tool_calls
    2  execution      model_runner, worker
    1  control plane  block_manager, scheduler     |     data plane  cpu_kernels, gguf_file, llama, loader, paged_attention,
                                                              sampler
    0  vocabulary     config, sequence
"""

from __future__ import annotations

import ast
import graphlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = "vllm_mini"
MODULES = {path.stem: path for path in sorted((ROOT / PACKAGE).glob("*.py"))}

VOCABULARY = {"config", "sequence"}
CONTROL_PLANE = {"block_manager", "scheduler"}
DATA_PLANE = {"cpu_kernels", "gguf_file", "llama", "loader", "paged_attention", "sampler"}
EDGES = {"__init__", "__main__", "answers", "api_server", "bench", "cli", "demo", "export", "fetch", "http_connection",
         "http_edge", "live", "live_server", "llm", "metrics", "protocol", "replay", "text_endpoints", "top", "trace"}

# module -> the modules of this package that it may import. From lower layers, or by name from its own.
ALLOWED = {
    # vocabulary
    "config": set(),
    "sequence": set(),
    # control plane: no tensors
    "block_manager": {"sequence"},
    "scheduler": {"block_manager", "config", "sequence"},
    # data plane: no sequences, no scheduler. paged_attention shows BlockManager's blocks as views of the pool.
    "paged_attention": {"block_manager", "config"},
    "cpu_kernels": {"config", "paged_attention"},
    "llama": {"config", "cpu_kernels", "paged_attention"},
    "gguf_file": {"config"},
    "loader": {"config", "gguf_file", "llama"},
    "sampler": {"config"},
    # execution: model_runner turns sequences into tensors; worker hands it steps and makes one up to measure memory
    "model_runner": {"config", "llama", "paged_attention", "sampler", "scheduler", "sequence"},
    "worker": {"block_manager", "config", "cpu_kernels", "llama", "loader", "model_runner", "paged_attention", "scheduler",
               "sequence"},
    # engine
    "chat_template": {"config", "sequence"},
    "tokenizer_files": {"config", "gguf_file"},
    "tokenizer": {"chat_template", "config", "sequence", "tokenizer_files"},
    "detokenizer": {"tokenizer"},
    "structured": {"sequence", "tokenizer"},
    "tool_calls": {"sequence", "structured"},
    "engine": {"block_manager", "config", "detokenizer", "loader", "paged_attention", "scheduler", "sequence", "structured",
               "tokenizer", "worker"},
    "async_engine": {"config", "engine", "sequence"},
    # edges
    "metrics": {"config", "engine", "scheduler", "sequence"},
    "llm": {"config", "engine", "sequence", "tokenizer"},
    "protocol": {"sequence", "tool_calls"},
    "answers": {"__init__", "engine", "protocol", "sequence", "tokenizer", "tool_calls"},
    "http_edge": {"async_engine", "sequence"},
    "http_connection": {"http_edge"},
    "text_endpoints": {"engine", "http_edge", "protocol", "sequence", "tokenizer"},
    "api_server": {"__init__", "answers", "async_engine", "engine", "http_connection", "http_edge", "live_server", "metrics",
                   "protocol", "sequence", "text_endpoints"},
    "live": {"block_manager", "engine", "scheduler", "sequence", "trace"},
    "trace": {"config"},
    "live_server": {"async_engine", "config", "engine", "http_edge", "live", "trace"},
    "replay": {"http_edge", "live_server", "trace"},
    "top": {"config", "trace"},
    "fetch": {"config"},
    "export": {"config", "loader", "tokenizer"},
    "demo": {"block_manager", "config", "engine", "fetch", "loader", "live", "llm", "scheduler", "sequence", "tokenizer"},
    "bench": {"config", "llm", "sequence", "tokenizer"},
    "cli": {"__init__", "api_server", "async_engine", "bench", "config", "demo", "engine", "export", "fetch", "live_server",
            "llm", "replay", "sequence", "tokenizer", "top", "trace"},
    "__main__": {"cli"},
    "__init__": {"config", "llm", "sequence"},
}

# Imports inside functions: only here, so that `--help`, `--version` and the control plane do not load torch. The hub's
# client, half a second, is the one library that the loader leaves until a model has to be fetched with it.
MAY_IMPORT_LATE = {"__init__", "__main__", "cli"}
LATE_LIBRARIES = {("loader", "huggingface_hub")}

# Libraries of text and terminals, which have their layers. Everything else is free above the control plane.
LIBRARIES_FROM_ENGINE_UP = {"fastapi", "jinja2", "pydantic", "starlette", "tokenizers", "transformers", "uvicorn"}
LIBRARIES_OF_EDGES = {"argparse", "click", "fastapi", "getopt", "pydantic", "rich", "starlette", "uvicorn"}

every_module = pytest.mark.parametrize("module", MODULES)


def parse(module: str) -> ast.Module:
    return ast.parse(MODULES[module].read_text(encoding="utf-8"))


def imported_names(node: ast.AST) -> list[str]:
    """The dotted names that an import statement may bring in; none for any other node."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        origin = ".".join(([PACKAGE] if node.level else []) + ([node.module] if node.module else []))
        return [f"{origin}.{alias.name}" for alias in node.names]
    return []


def imports_of(node: ast.AST) -> tuple[set[str], set[str]]:
    """The modules of this package, and the top names of all others, that are imported anywhere below a node."""
    own, others = set(), set()
    for name in (name for child in ast.walk(node) for name in imported_names(child)):
        top, _, rest = name.partition(".")
        if top != PACKAGE:
            others.add(top)
        else:
            module = rest.split(".")[0]
            own.add(module if module in MODULES or module in ALLOWED else "__init__")
    return own, others


def functions_of(node: ast.AST) -> Iterator[ast.AST]:
    return (child for child in ast.walk(node) if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)))


def layer_violations(module: str, tree: ast.Module) -> list[str]:
    """What a module of this name may not do, in words; `tree` is its source."""
    own, others = imports_of(tree)
    found = [f"imports {name}" for name in sorted(own - ALLOWED[module])]
    if "vllm" in others:
        found.append("imports vllm itself")
    if module in VOCABULARY | CONTROL_PLANE:
        found += [f"imports {name}, not of the standard library" for name in sorted(others - sys.stdlib_module_names)]
    if module in VOCABULARY | CONTROL_PLANE | DATA_PLANE | {"model_runner", "worker"}:
        found += [f"imports {name}, of text or HTTP" for name in sorted(others & LIBRARIES_FROM_ENGINE_UP)]
    if module not in EDGES:
        found += [f"imports {name}, for edges only" for name in sorted(others & LIBRARIES_OF_EDGES)]
        found += [f"line {node.lineno}: {what}" for node in ast.walk(tree) if (what := edge_only_act(node))]
    if module not in MAY_IMPORT_LATE:
        for function in functions_of(tree):
            late_own, late_others = imports_of(function)
            allowed = {name for name in late_others if (module, name) in LATE_LIBRARIES}
            found += [f"imports {name} inside a function" for name in sorted(late_own | (late_others - allowed))]
    return found


def edge_only_act(node: ast.AST) -> str | None:
    """What is wrong with a node below the edges: it prints, reads the environment or looks at arguments."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("print", "input", "breakpoint"):
        return f"calls {node.func.id}"
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        name = f"{node.value.id}.{node.attr}"
        if name in ("os.environ", "os.environb", "os.getenv", "os.putenv", "sys.argv", "sys.stdout", "sys.stderr"):
            return f"uses {name}"
    if isinstance(node, ast.ImportFrom) and not node.level and node.module in ("os", "sys"):
        names = {alias.name for alias in node.names} & {"environ", "environb", "getenv", "argv", "stdout", "stderr"}
        return f"imports {', '.join(sorted(names))}" if names else None
    return None


def test_every_module_is_in_the_table():
    missing = sorted(set(MODULES) - set(ALLOWED))
    assert not missing, f"say in ALLOWED (and in the picture above it) what these may import: {', '.join(missing)}"
    assert len(MODULES) > 10, "the package was not found"


def test_the_table_has_no_cycles_and_no_unknown_names():
    assert set().union(*ALLOWED.values()) <= set(ALLOWED)
    tuple(graphlib.TopologicalSorter({**ALLOWED, "__init__": {"config", "sequence"}}).static_order())


def test_the_table_keeps_the_two_planes_apart():
    for module in VOCABULARY | CONTROL_PLANE:
        assert ALLOWED[module] <= VOCABULARY | CONTROL_PLANE
    for module in DATA_PLANE:
        assert not ALLOWED[module] & {"scheduler", "sequence"}
    both = {module for module in set(ALLOWED) - EDGES if "sequence" in ALLOWED[module] and "sampler" in ALLOWED[module]}
    assert both == {"model_runner"}


@every_module
def test_a_module_imports_and_does_only_what_its_layer_may(module):
    found = layer_violations(module, parse(module))
    assert not found, f"{module}.py: {'; '.join(found)}"


@pytest.mark.parametrize(("module", "source", "complaint"), [
    ("config", "import vllm_mini.sequence", "imports sequence"),
    ("config", "from . import sequence", "imports sequence"),
    ("sequence", "from .config import ConfigError", "imports config"),
    ("block_manager", "from vllm_mini import scheduler", "imports scheduler"),
    ("scheduler", "import torch", "imports torch, not of the standard library"),
    ("scheduler", "from numpy import array", "imports numpy, not of the standard library"),
    ("scheduler", "if True:\n    from vllm_mini.worker import Worker", "imports worker"),
    ("scheduler", "from vllm_mini import LLM", "imports __init__"),
    ("sampler", "from vllm_mini.sequence import Sequence", "imports sequence"),
    ("llama", "def f():\n    from vllm_mini.config import LlamaConfig", "imports config inside a function"),
    ("worker", "import tokenizers", "imports tokenizers, of text or HTTP"),
    ("engine", "import vllm", "imports vllm itself"),
    ("engine", "from vllm.outputs import RequestOutput", "imports vllm itself"),
    ("engine", "print('hello')", "line 1: calls print"),
    ("engine", "import rich", "imports rich, for edges only"),
    ("engine", "import argparse", "imports argparse, for edges only"),
    ("loader", "import os\nx = os.environ['A']", "line 2: uses os.environ"),
    ("loader", "import os\nx = os.getenv('A')", "line 2: uses os.getenv"),
    ("loader", "from os import environ, path", "line 1: imports environ"),
    ("engine", "async def f():\n    import json", "imports json inside a function"),
])
def test_the_rules_notice_what_breaks_them(module, source, complaint):
    assert complaint in layer_violations(module, ast.parse(source))


@pytest.mark.parametrize(("module", "source"), [
    ("scheduler", "from vllm_mini.config import SchedulerConfig\nfrom vllm_mini.sequence import Sequence"),
    ("paged_attention", "import torch\nfrom .block_manager import BlockManager"),
    ("cli", "def main():\n    import torch\n    from vllm_mini.engine import LLMEngine\n    print(1)"),
    ("loader", "def f():\n    import huggingface_hub"),
    ("demo", "print('step')"),
])
def test_the_rules_leave_alone_what_is_allowed(module, source):
    assert layer_violations(module, ast.parse(source)) == []


def modules_loaded_by(code: str) -> set[str]:
    """The top-level modules in memory after a fresh interpreter ran `code`."""
    command = [sys.executable, "-c", f"{code}\nimport sys\nprint(*sys.modules)"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return {name.split(".")[0] for name in result.stdout.split()}


@pytest.mark.parametrize("module", sorted(VOCABULARY | CONTROL_PLANE))
def test_vocabulary_and_control_plane_load_without_torch(module):
    loaded = modules_loaded_by(f"import {PACKAGE}.{module}")
    assert PACKAGE in loaded
    assert not loaded & {"numpy", "tokenizers", "torch", "transformers"}


def test_the_package_and_its_command_line_load_without_torch():
    assert "torch" not in modules_loaded_by(f"import {PACKAGE}")
    assert "torch" not in modules_loaded_by(f"import {PACKAGE}.cli")


def test_the_llm_class_is_found_on_first_use():
    loaded = modules_loaded_by(f"import {PACKAGE}\nassert {PACKAGE}.LLM.__module__ == '{PACKAGE}.llm'")
    assert "torch" in loaded
    modules_loaded_by(f"from {PACKAGE} import LLM, SamplingParams")


def test_an_unknown_name_of_the_package_is_an_attribute_error():
    modules_loaded_by(f"import {PACKAGE}\nassert not hasattr({PACKAGE}, 'LLMM')")


def test_what_the_package_shows_is_listed_and_there():
    modules_loaded_by(f"import {PACKAGE}\nfor name in {PACKAGE}.__all__:\n    getattr({PACKAGE}, name)")


def test_paged_attention_shows_the_block_manager_too():
    modules_loaded_by(
        f"from {PACKAGE}.paged_attention import Block, BlockManager\n"
        f"from {PACKAGE} import block_manager\n"
        "assert BlockManager is block_manager.BlockManager")
