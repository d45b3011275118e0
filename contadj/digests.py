"""Digests of code: what changes when the code does, not when its comments, hints or layout do."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterable
from pathlib import Path


def code_of(path: str | Path) -> bytes:
    """Return what a Python file says, without comments, docstrings, type hints and layout."""
    tree = ast.parse(Path(path).read_bytes())
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                node.body = node.body[1:]
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            node.returns = None
        if isinstance(node, ast.arg):
            node.annotation = None
    return ast.dump(tree).encode()


def code_digest(modules: Iterable[str]) -> str:
    """Return a digest of the code of modules of this package, none of which is imported.

    Parameters
    ----------
    modules : iterable of str
        Names such as "contadj.torch._problems"; one that does not exist counts as empty.
    """
    digest = hashlib.sha256()
    for name in modules:
        digest.update(name.encode())
        package, *parts = name.split(".")
        assert package == __package__
        path = Path(__file__).parent.joinpath(*parts).with_suffix(".py")
        if path.is_file():
            digest.update(code_of(path))
    return digest.hexdigest()[:16]
