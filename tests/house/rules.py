"""House rules that ruff and mypy cannot express, as functions from a parsed file to violations."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_PARAMETERS = 8

_SEAMS = frozenset({"errors", "types", "config", "metrics", "protocols"})
# Which layers of the package each layer may import, besides itself. A layer is a module or folder of the package.
ALLOWED_IMPORTS: dict[str, frozenset[str]] = {
    "errors": frozenset(),
    "types": frozenset({"errors"}),
    "config": frozenset({"errors", "types"}),
    "metrics": frozenset({"errors", "types"}),
    "protocols": _SEAMS - {"protocols"},
    "engine": _SEAMS,
    "weights": _SEAMS,
    "policy": _SEAMS,
    "testing": _SEAMS,
    "service": _SEAMS | {"engine"},
    "async_vllm": _SEAMS | {"service", "weights", "engine"},
    "envs": _SEAMS | {"policy"},
    "collectors": _SEAMS | {"policy", "weights", "envs"},
    "server": _SEAMS | {"policy", "service", "engine", "async_vllm"},
}
# Third-party packages that only these layers may import.
FENCED_PACKAGES: dict[str, frozenset[str]] = {
    "vllm": frozenset({"engine", "server"}),
    "ray": frozenset({"engine", "service", "collectors", "weights"}),
}

Node = TypeVar("Node", bound=ast.AST)


@dataclass(frozen=True)
class Violation:
    """A rule broken at a line of a file."""

    path: str
    line: int
    rule: str
    detail: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.rule}: {self.detail}"


@dataclass(frozen=True)
class SourceFile:
    """One parsed module of the package.

    Attributes:
        path: Relative to the package, for example ``weights/source.py``.
        package: Name of the package.
        text: Its source.
        tree: Its syntax tree.
    """

    path: str
    package: str
    text: str
    tree: ast.Module

    @classmethod
    def parse(cls, text: str, *, path: str, package: str = "rl_vllm") -> SourceFile:
        return cls(path, package, text, ast.parse(text))

    @property
    def layer(self) -> str:
        """First part of the path, without the suffix: ``weights`` for ``weights/source.py``."""
        return self.path.split("/")[0].removesuffix(".py")


def check_package(folder: Path) -> list[Violation]:
    """Every violation in the Python files below ``folder``, whose name is the package's."""
    files = [
        SourceFile.parse(path.read_text(), path=path.relative_to(folder).as_posix(), package=folder.name)
        for path in sorted(folder.rglob("*.py"))
    ]
    return [violation for file in files for violation in check_file(file)]


def check_file(file: SourceFile) -> list[Violation]:
    """Every violation in one file, rule by rule."""
    return [
        Violation(file.path, line, name, detail) for name, rule in RULES.items() for line, detail in sorted(rule(file))
    ]


Found = Iterator[tuple[int, str]]


def short_files(file: SourceFile) -> Found:
    """A file has at most ``MAX_FILE_LINES`` lines."""
    count = len(file.text.splitlines())
    if count > MAX_FILE_LINES:
        yield 1, f"{count} lines, at most {MAX_FILE_LINES}"


def short_functions(file: SourceFile) -> Found:
    """A function has at most ``MAX_FUNCTION_LINES`` lines, its docstring not counted."""
    for function in _nodes(file, ast.FunctionDef, ast.AsyncFunctionDef):
        count = _num_lines(function)
        if ast.get_docstring(function, clean=False) is not None:
            count -= _num_lines(function.body[0])
        if count > MAX_FUNCTION_LINES:
            yield function.lineno, f"{function.name} has {count} lines, at most {MAX_FUNCTION_LINES}"


def few_parameters(file: SourceFile) -> Found:
    """A function takes at most ``MAX_PARAMETERS`` named parameters, ``self`` and ``cls`` not counted."""
    for function in _nodes(file, ast.FunctionDef, ast.AsyncFunctionDef):
        arguments = function.args
        names = {each.arg for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}
        count = len(names - {"self", "cls"})
        if count > MAX_PARAMETERS:
            yield function.lineno, f"{function.name} takes {count} parameters, at most {MAX_PARAMETERS}"


def import_direction(file: SourceFile) -> Found:
    """A layer imports only the layers listed for it."""
    if file.layer not in ALLOWED_IMPORTS:
        return
    allowed = ALLOWED_IMPORTS[file.layer] | {file.layer}
    for line, module in _imported_modules(file):
        package, _, rest = module.partition(".")
        layer = rest.split(".")[0]
        if package == file.package and layer and layer not in allowed:
            yield line, f"{file.layer} must not import {file.package}.{layer}"


def known_layers(file: SourceFile) -> Found:
    """Every module of the package is in a layer that the import table knows."""
    if file.layer not in ALLOWED_IMPORTS and file.layer not in {"__init__", "__main__"}:
        yield 1, f"{file.layer} is not in ALLOWED_IMPORTS: say there what it may import"


def fenced_packages(file: SourceFile) -> Found:
    """A fenced third-party package is imported only where the table allows."""
    for line, module in _imported_modules(file):
        package = module.split(".")[0]
        if package in FENCED_PACKAGES and file.layer not in FENCED_PACKAGES[package]:
            yield line, f"only {', '.join(sorted(FENCED_PACKAGES[package]))} may import {package}"


def answered_exceptions(file: SourceFile) -> Found:
    """No handler is silent, and one that catches everything hands the error on."""
    for handler in _nodes(file, ast.ExceptHandler):
        if all(isinstance(statement, ast.Pass | ast.Continue) for statement in handler.body):
            yield handler.lineno, "the error disappears: let it rise, or use contextlib.suppress on one named error"
        elif _catches_everything(handler) and not _hands_on(handler):
            yield handler.lineno, "catches everything and tells nobody: raise, or set_exception on what waits"


def stated_types(file: SourceFile) -> Found:
    """No ``hasattr``, and no ``getattr`` with a default."""
    for call in _nodes(file, ast.Call):
        name = ast.unparse(call.func)
        if name == "hasattr":
            yield call.lineno, "hasattr: state the type, or tell versions apart in one place"
        if name == "getattr" and len(call.args) == 3:
            yield call.lineno, "getattr with a default hides a field that is missing"


def bounded_waits(file: SourceFile) -> Found:
    """``ray.get`` and ``ray.wait`` have a deadline, and are not called on an event loop."""
    for call in _ray_waits(file.tree):
        if all(keyword.arg != "timeout" for keyword in call.keywords):
            yield call.lineno, f"{ast.unparse(call.func)} without timeout= can wait for ever"
    for function in _nodes(file, ast.AsyncFunctionDef):
        for call in _ray_waits(function):
            yield call.lineno, f"{ast.unparse(call.func)} blocks the event loop: await the reference"


RULES: dict[str, Callable[[SourceFile], Found]] = {
    rule.__name__: rule
    for rule in (
        short_files,
        short_functions,
        few_parameters,
        known_layers,
        import_direction,
        fenced_packages,
        answered_exceptions,
        stated_types,
        bounded_waits,
    )
}


def _nodes(file: SourceFile, *kinds: type[Node]) -> Iterator[Node]:
    return (node for node in ast.walk(file.tree) if isinstance(node, kinds))


def _num_lines(node: ast.stmt) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def _imported_modules(file: SourceFile) -> Found:
    """Line and dotted name of every imported module; ``from rl_vllm import x`` counts as ``rl_vllm.x``."""
    for node in _nodes(file, ast.Import, ast.ImportFrom):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
            continue
        source = _absolute_name(node, file)
        names = [f"{source}.{alias.name}" for alias in node.names] if source == file.package else [source]
        yield from ((node.lineno, name) for name in names if not name.endswith("__"))


def _absolute_name(node: ast.ImportFrom, file: SourceFile) -> str:
    """What stands between ``from`` and ``import``, with leading dots resolved."""
    if node.level == 0:
        return node.module or ""
    folders = [file.package, *file.path.split("/")[:-1]]
    kept = folders[: len(folders) - node.level + 1]
    return ".".join([*kept, node.module] if node.module else kept)


def _catches_everything(handler: ast.ExceptHandler) -> bool:
    if handler.type is None:
        return True
    caught = {node.id for node in ast.walk(handler.type) if isinstance(node, ast.Name)}
    return not caught.isdisjoint({"Exception", "BaseException"})


def _hands_on(handler: ast.ExceptHandler) -> bool:
    return any(
        isinstance(node, ast.Raise) or (isinstance(node, ast.Attribute) and node.attr == "set_exception")
        for node in ast.walk(handler)
    )


def _ray_waits(root: ast.AST) -> Iterator[ast.Call]:
    calls = (node for node in ast.walk(root) if isinstance(node, ast.Call))
    return (call for call in calls if ast.unparse(call.func) in {"ray.get", "ray.wait"})
