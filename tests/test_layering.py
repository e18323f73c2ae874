"""Who may import whom: strictly downward, by imports and cimports, lazy ones included.

The table below is the rule; docs/architecture.md draws it.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import miro_client
import miro_cy

ROOT = Path(__file__).parents[1]
PACKAGES = {"miro_cy": ROOT, "miro_worker": ROOT / "worker", "miro_client": ROOT / "client"}

#: Layer of miro_cy -> the layers directly below it. What is below those may be imported too.
BELOW = {
    "errors": set(),
    "native": set(),
    "batch": {"errors"},
    "sampling.params": {"errors"},
    "requests": {"errors", "sampling.params"},
    "config": {"errors"},
    "deadlines": set(),
    "hub": {"errors"},
    "machine": set(),
    "_kernels": {"errors", "batch", "native"},
    "formats": {"errors"},
    "text": {"formats"},
    "cache": {"errors", "native"},
    "sched": {"cache", "batch", "config"},
    "sampling": {"_kernels", "sampling.params"},
    "model": {"_kernels", "formats", "batch", "config"},
    "prepare": {"text", "requests"},
    "scoring": {"requests", "sampling"},
    "live": {"scoring", "sampling", "text", "requests"},
    "beams": {"live"},
    "completions": {"requests"},
    "core": {"cache", "sched", "prepare", "beams", "batch", "deadlines"},
    "driver": {"core"},
    "memory": {"model", "sched"},
    "loading": {"core", "memory", "hub", "machine"},
    "inspect": {"loading"},
    "engine": {"driver", "loading", "completions"},
    "tools": {"engine", "inspect"},
}
#: What the leaves that both ends share may import besides the standard library.
SHARED_LEAVES = {
    "miro_client.awake": set(),
    "miro_client.errors": set(),
    "miro_client.checks": {"miro_client.errors"},
    "miro_client.results": set(),
    "miro_client.wire": {"msgspec", "miro_client.checks", "miro_client.errors"},
}
#: What the engine may use of the client package: what it checks, raises and returns is the same over a socket.
FOR_ENGINE = ("miro_client.checks", "miro_client.errors", "miro_client.results")
#: What the worker may use of the client package.
FOR_WORKER = {*SHARED_LEAVES, "miro_client.endpoint"}
#: Packages in which a function may import the engine or the worker, to run one in this process.
LAZY_ENGINE = {"miro_client.cli", "miro_client.gateway"}


class Import(NamedTuple):
    """One import: the module named, at module level or inside a function, for type checking only or not."""

    target: str
    lazy: bool
    typing: bool


class Module(NamedTuple):
    name: str
    path: Path


def modules(package: str) -> list[Module]:
    root = PACKAGES[package]
    found = []
    for path in sorted((root / package).rglob("*")):
        if path.suffix in (".py", ".pyi", ".pyx", ".pxd", ".pxi"):
            parts = path.relative_to(root).with_suffix("").parts
            found.append(Module(".".join(parts[:-1] if parts[-1] == "__init__" else parts), path))
    return found


def absolute(name: str, package: str) -> str:
    """Resolve leading dots against the package that the importing module is in."""
    dots = len(name) - len(name.lstrip("."))
    if not dots:
        return name
    base = package.split(".")
    return ".".join([*base[: len(base) - dots + 1], *filter(None, [name[dots:]])])


def full_names(source: str, names: list[str]) -> list[str]:
    """`from source import names`, as modules: a name that a lazy `__init__` hands out stands for where it lives."""
    for facade in (miro_cy, miro_client):
        if source == facade.__name__:
            homes = {k: v if "." in v else f"{source}.{v}" for k, v in facade._HOMES.items()}
            return [homes.get(name, f"{source}.{name}") for name in names if name != "__version__"]
    return [f"{source}.{name}" for name in names]


def python_imports(text: str, package: str) -> Iterator[Import]:
    def walk(node: ast.AST, lazy: bool, typing: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, lazy, typing) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            source = absolute("." * node.level + (node.module or ""), package)
            yield from (Import(name, lazy, typing) for name in full_names(source, [a.name for a in node.names]))
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for child in node.body:
                yield from walk(child, lazy, True)
            for child in node.orelse:
                yield from walk(child, lazy, typing)
        else:
            inner = lazy or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            for child in ast.iter_child_nodes(node):
                yield from walk(child, inner, typing)

    return walk(ast.parse(text), False, False)


STRINGS = re.compile(r'"""[\s\S]*?"""|\'\'\'[\s\S]*?\'\'\'|#[^\n]*')
FROM = re.compile(r"^\s*from\s+([.\w]+)\s+c?import\s+(\([^)]*\)|[^\n]*)", re.M)
PLAIN = re.compile(r"^\s*c?import\s+([^\n]*)", re.M)


def cython_imports(text: str, package: str) -> Iterator[Import]:
    text = STRINGS.sub("", text).replace("\\\n", " ")
    for source, names in FROM.findall(text):
        imported = [name.split()[0] for name in names.strip("() \n").split(",") if name.strip()]
        yield from (Import(name, False, False) for name in full_names(absolute(source, package), imported))
    for names in PLAIN.findall(text):
        yield from (Import(name.split()[0], False, False) for name in names.split(",") if name.strip())


def imports(module: Module) -> list[Import]:
    text = module.path.read_text()
    package = module.name if module.path.stem == "__init__" else module.name.rpartition(".")[0]
    reader = python_imports if module.path.suffix in (".py", ".pyi") else cython_imports
    return list(reader(text, package))


def layer(name: str) -> str | None:
    """The layer of a module of miro_cy; None for the package itself."""
    parts = name.split(".")[1:]
    return "sampling.params" if parts[:2] == ["sampling", "params"] else parts[0] if parts else None


def reachable(start: str) -> set[str]:
    seen, queue = {start}, [start]
    while queue:
        fresh = BELOW[queue.pop()] - seen
        seen |= fresh
        queue += fresh
    return seen


def engine_violation(module: str, target: str) -> str | None:
    """Why a module of miro_cy may not import `target`, or None if it may."""
    top = target.partition(".")[0]
    if top == "miro_worker" or (top == "miro_client" and not target.startswith(FOR_ENGINE)):
        return f"{module} -> {target}: of the other packages the engine may use {', '.join(FOR_ENGINE)} only"
    mine, theirs = layer(module), layer(target)
    if top != "miro_cy" or mine is None or theirs is None or target == "miro_cy.__version__":
        return None
    if mine not in BELOW or theirs not in BELOW:
        return f"{module} -> {target}: {theirs if mine in BELOW else mine} has no place in the table of layers"
    return None if theirs in reachable(mine) else f"{module} -> {target}: {theirs} is not below {mine}"


def worker_violation(module: str, target: str) -> str | None:
    """Why a module of miro_worker may not import `target`, or None if it may."""
    shared = any(target == name or target.startswith(f"{name}.") for name in FOR_WORKER)
    if target.partition(".")[0] == "miro_client" and not shared and target != "miro_client.__version__":
        return f"{module} -> {target}: of miro_client the worker may use {', '.join(sorted(FOR_WORKER))}"
    return f"{module} -> {target}: tools is above the worker" if target.startswith("miro_cy.tools") else None


def client_violation(module: str, found: Import) -> str | None:
    """Why a module of miro_client may not import that, or None if it may."""
    top = found.target.partition(".")[0]
    leaf = ".".join(module.split(".")[:2])
    if leaf in SHARED_LEAVES:
        allowed = any(
            found.target == name or found.target.startswith(f"{name}.") for name in SHARED_LEAVES[leaf] | {leaf}
        )
        return None if allowed or top in sys.stdlib_module_names else f"{module} -> {found.target}: it is a leaf"
    if top not in ("miro_cy", "miro_worker") or found.typing:
        return None
    if found.lazy and ".".join(module.split(".")[:2]) in LAZY_ENGINE:
        return None
    return f"{module} -> {found.target}: only the CLI and the gateway may, and only inside a function"


def test_engine_imports_point_downward() -> None:
    wrong = [engine_violation(m.name, found.target) for m in modules("miro_cy") for found in imports(m)]
    assert [text for text in wrong if text] == []


def test_worker_imports_only_the_shared_leaves_of_the_client() -> None:
    wrong = [worker_violation(m.name, found.target) for m in modules("miro_worker") for found in imports(m)]
    assert [text for text in wrong if text] == []


def test_client_imports_no_engine() -> None:
    wrong = [client_violation(m.name, found) for m in modules("miro_client") for found in imports(m)]
    assert [text for text in wrong if text] == []


def test_every_module_of_the_engine_has_a_layer() -> None:
    names = {layer(m.name) for m in modules("miro_cy")} - {None}
    assert names - set(BELOW) == set(), "give them a place in the table of layers"
    assert len(names) > 5, "the modules were not found"


def test_the_table_has_no_cycle() -> None:
    for name, below in BELOW.items():
        assert all(name not in reachable(other) for other in below)


@pytest.mark.parametrize(
    ("module", "target", "allowed"),
    [
        ("miro_cy.engine", "miro_cy.sched.scheduler", True),
        ("miro_cy.engine", "miro_cy._kernels.matmul", True),
        ("miro_cy.sched.scheduler", "miro_cy.cache.block_pool", True),
        ("miro_cy.sched.scheduler", "numpy", True),
        ("miro_cy.sched.scheduler", "miro_cy.model.executor", False),
        ("miro_cy.cache.block_pool", "miro_cy.sched.scheduler", False),
        ("miro_cy.model.executor", "miro_cy.sched", False),
        ("miro_cy._kernels.ops", "miro_cy.batch.BatchView", True),
        ("miro_cy._kernels.ops", "miro_cy.formats.gguf", False),
        ("miro_cy.requests", "miro_cy.sampling.params", True),
        ("miro_cy.requests", "miro_cy.sampling.sampler", False),
        ("miro_cy.text.bpe", "miro_client.wire", False),
        ("miro_cy.nowhere", "miro_cy.errors", False),
    ],
)
def test_rule_of_the_engine(module: str, target: str, allowed: bool) -> None:
    assert (engine_violation(module, target) is None) == allowed


def test_rules_of_worker_and_client() -> None:
    assert worker_violation("miro_worker.io", "miro_client.wire.decode") is None
    assert worker_violation("miro_worker.io", "miro_client.client.Client") is not None
    assert client_violation("miro_client.client", Import("miro_cy.engine", True, False)) is not None
    assert client_violation("miro_client.cli.run", Import("miro_cy.engine", True, False)) is None
    assert client_violation("miro_client.cli.run", Import("miro_cy.engine", False, False)) is not None
    assert client_violation("miro_client.cli.run", Import("miro_cy.engine", False, True)) is None
    assert client_violation("miro_client.wire", Import("zmq", False, False)) is not None
    assert client_violation("miro_client.errors", Import("msgspec", True, False)) is not None


def test_reader_of_python_sees_every_kind_of_import() -> None:
    text = """
from typing import TYPE_CHECKING
import miro_cy.model as m, numpy
from . import beside
from ..up import name
from miro_cy import Engine
if TYPE_CHECKING:
    from miro_client import Client
def f():
    from miro_cy.sched import scheduler
    "from miro_cy import nothing"
"""
    found = {(i.target, i.lazy, i.typing) for i in python_imports(text, "miro_cy.text")}
    assert found == {
        ("typing.TYPE_CHECKING", False, False),
        ("miro_cy.model", False, False),
        ("numpy", False, False),
        ("miro_cy.text.beside", False, False),
        ("miro_cy.up.name", False, False),
        ("miro_cy.engine", False, False),
        ("miro_client.client", False, True),
        ("miro_cy.sched.scheduler", True, False),
    }


def test_reader_of_cython_sees_every_kind_of_import() -> None:
    text = '''
"""
from miro_cy.nowhere import docstring
"""
from miro_cy.batch cimport BatchView, Row  # from miro_cy.comment cimport x
from miro_cy.cache.block_pool cimport (
    BlockPool,
    Other as O,
)
cimport miro_cy.model.spec as spec, cython
from . import beside
    import lazy
'''
    assert {i.target for i in cython_imports(text, "miro_cy.sched")} == {
        "miro_cy.batch.BatchView",
        "miro_cy.batch.Row",
        "miro_cy.cache.block_pool.BlockPool",
        "miro_cy.cache.block_pool.Other",
        "miro_cy.model.spec",
        "cython",
        "miro_cy.sched.beside",
        "lazy",
    }
