"""Documentation of dataclass fields, read from the source without importing or executing it.

The first of these that exists:

1. `field(metadata={"doc": "…"})`;
2. a string literal right below the field;
3. a comment at the end of the field's line;
4. the comment lines right above the field.
"""

import ast
import functools
import inspect
import io
import sys
import tokenize
from itertools import takewhile

Docs = dict[tuple[str, str], str]


def field_doc(cls: type, name: str) -> str:
    """Documentation of a dataclass field on one line; empty if there is none or no source."""
    metadata = cls.__dataclass_fields__[name].metadata  # type: ignore[attr-defined]
    if "doc" in metadata:
        return " ".join(str(metadata["doc"]).split())
    docs = (_module_docs(owner.__module__).get((owner.__qualname__, name)) for owner in cls.__mro__)
    return next((doc for doc in docs if doc), "")


def class_doc(cls: type) -> str:
    """First line of a class's own docstring; empty without one (the one that `dataclass` generates does not count)."""
    doc = (cls.__doc__ or "").strip()
    return "" if doc.startswith(f"{cls.__name__}(") else doc.partition("\n")[0]


@functools.cache
def _module_docs(module: str) -> Docs:
    try:
        return source_docs(inspect.getsource(sys.modules[module]))
    except (OSError, TypeError, KeyError):  # built in, typed at a prompt, or without its source
        return {}


def source_docs(source: str) -> Docs:
    """Docs of all annotated names in a module's source, by (qualified class name, field name)."""
    lines = source.splitlines()
    comments = _comments(source)
    docs: Docs = {}

    def comment_above(line: int) -> str:
        whole = takewhile(lambda n: n in comments and lines[n - 1].lstrip().startswith("#"), range(line - 1, 0, -1))
        return " ".join(comments[number] for number in reversed(list(whole)))

    def visit(body: list[ast.stmt], prefix: str) -> None:
        for node, following in zip(body, [*body[1:], None], strict=True):
            if isinstance(node, ast.ClassDef):
                visit(node.body, f"{prefix}{node.name}.")
            elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                visit(node.body, f"{prefix}{node.name}.<locals>.")
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                text = _string(following) or comments.get(node.end_lineno or node.lineno) or comment_above(node.lineno)
                if text := " ".join(text.split()):
                    docs[prefix.removesuffix("."), node.target.id] = text

    visit(ast.parse(source).body, "")
    return docs


def _string(node: ast.stmt | None) -> str:
    """The text of a statement that is only a string; else empty."""
    value = node.value if isinstance(node, ast.Expr) else None
    return value.value if isinstance(value, ast.Constant) and isinstance(value.value, str) else ""


def _comments(source: str) -> dict[int, str]:
    """Comments by line, without those for tools."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = [token for token in tokens if token.type == tokenize.COMMENT]
    return {
        token.start[0]: token.string.lstrip("#").removeprefix(":").strip()
        for token in comments
        if not token.string.startswith(("# noqa", "# type:", "# pants:"))
    }
