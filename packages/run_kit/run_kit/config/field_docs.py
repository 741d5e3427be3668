"""Documentation of dataclass fields: the string below each, read from the source without importing or executing it."""

import ast
import functools
import inspect
import sys


def field_doc(cls: type, name: str) -> str:
    """Documentation of a dataclass field on one line; empty if there is none or no source."""
    docs = (_module_docs(owner.__module__).get((owner.__qualname__, name)) for owner in cls.__mro__)
    return next((doc for doc in docs if doc), "")


def class_doc(cls: type) -> str:
    """First line of a class's own docstring; empty without one (the one that `dataclass` generates does not count)."""
    doc = (cls.__doc__ or "").strip()
    return "" if doc.startswith(f"{cls.__name__}(") else doc.partition("\n")[0]


@functools.cache
def _module_docs(module: str) -> dict[tuple[str, str], str]:
    """Docs of all annotated names in a module's source, by (qualified class name, field name)."""
    try:
        tree = ast.parse(inspect.getsource(sys.modules[module]))
    except (OSError, TypeError, KeyError):  # built in, typed at a prompt, or without its source
        return {}
    docs: dict[tuple[str, str], str] = {}

    def visit(body: list[ast.stmt], prefix: str) -> None:
        for node, following in zip(body, [*body[1:], None], strict=True):
            if isinstance(node, ast.ClassDef):
                visit(node.body, f"{prefix}{node.name}.")
            elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                visit(node.body, f"{prefix}{node.name}.<locals>.")
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                docs[prefix.removesuffix("."), node.target.id] = " ".join(_string(following).split())

    visit(tree.body, "")
    return docs


def _string(node: ast.stmt | None) -> str:
    """The text of a statement that is only a string; else empty."""
    value = node.value if isinstance(node, ast.Expr) else None
    return value.value if isinstance(value, ast.Constant) and isinstance(value.value, str) else ""
