"""Reads who imports whom from the source, without running any of it. Knows no rule about who may.

Every import counts: at the top, inside a function, under `TYPE_CHECKING`, relative, or by
`importlib.import_module("name")`.
"""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


class Import(NamedTuple):
    importer: str  # dotted name of the module that imports
    imported: str  # dotted name of what is imported: a module where the tree has it, else as written
    where: str  # "path:line", for messages


def modules(root: Path, packages: tuple[str, ...]) -> dict[str, Path]:
    """Every module of `packages` under `root` by its dotted name; a package goes by its own name."""
    found = {}
    for package in packages:
        for path in sorted((root / package).rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(root: Path, packages: tuple[str, ...]) -> list[Import]:
    """Every import that a module of `packages` makes, of whatever."""
    known = modules(root, packages)
    found = []
    for importer, path in known.items():
        package = importer if path.name == "__init__.py" else importer.rpartition(".")[0]
        for line, imported in _imported(ast.parse(path.read_text(), str(path)), package, known):
            found.append(Import(importer, imported, f"{path.relative_to(root)}:{line}"))
    return found


def _imported(tree: ast.AST, package: str, known: dict[str, Path]) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                for name in names:
                    yield node.lineno, name.name
            case ast.ImportFrom(module=module, names=names, level=level):
                source = _absolute(module or "", level, package)
                for name in names:
                    member = f"{source}.{name.name}"
                    yield node.lineno, member if member in known else source
            case ast.Call(
                func=ast.Attribute(attr="import_module") | ast.Name(id="import_module" | "__import__"),
                args=[ast.Constant(value=str(name)), *_],
            ):
                level = len(name) - len(name.lstrip("."))
                yield node.lineno, _absolute(name[level:], level, package)


def _absolute(name: str, level: int, package: str) -> str:
    """The full name of a module that code in `package` calls `level` dots and `name`."""
    if level == 0:
        return name
    parts = package.split(".")
    base = parts[: len(parts) - (level - 1)]
    return ".".join([*base, name] if name else base)
