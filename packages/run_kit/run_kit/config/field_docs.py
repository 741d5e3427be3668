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

Docs = dict[tuple[str, str], str]


def field_doc(cls: type, name: str) -> str:
    """Documentation of a dataclass field on one line; empty if there is none or no source."""
    metadata = cls.__dataclass_fields__[name].metadata  # type: ignore[attr-defined]
    if "doc" in metadata:
        return " ".join(str(metadata["doc"]).split())
    docs = (_module_docs(owner.__module__).get((owner.__qualname__, name)) for owner in cls.__mro__)
    return next((doc for doc in docs if doc), "")


def class_doc(cls: type) -> str:
    """First line of a class's own docstring; empty if it has none (`dataclass` generates one, ignored)."""
    doc = (cls.__doc__ or "").strip()
    return "" if doc.startswith(f"{cls.__name__}(") else doc.partition("\n")[0]


@functools.cache
def _module_docs(module: str) -> Docs:
    try:
        return source_docs(inspect.getsource(sys.modules[module]))
    except (OSError, TypeError, KeyError):  # built in, typed at a prompt, or without its source
        return {}


def source_docs(source: str) -> Docs:
    """Field docs of all classes in a module's source, by (qualified class name, field name)."""
    comments, whole_lines = _comments(source)
    docs: Docs = {}

    def visit(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.ClassDef):
                name = f"{prefix}{node.name}"
                _class_docs(node, name, comments, whole_lines, docs)
                visit(node.body, f"{name}.")
            elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                visit(node.body, f"{prefix}{node.name}.<locals>.")

    visit(ast.parse(source).body, "")
    return docs


def _class_docs(node: ast.ClassDef, qualname: str, comments: dict[int, str], whole: set[int], docs: Docs) -> None:
    for statement, following in zip(node.body, [*node.body[1:], None], strict=True):
        if not (isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)):
            continue
        text = ""
        if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
            text = following.value.value if isinstance(following.value.value, str) else ""
        text = text or comments.get(statement.end_lineno or statement.lineno, "")
        if not text:
            line = statement.lineno - 1
            above: list[str] = []
            while line in whole:
                above.insert(0, comments[line])
                line -= 1
            text = " ".join(above)
        if text := " ".join(text.split()):
            docs[qualname, statement.target.id] = text


def _comments(source: str) -> tuple[dict[int, str], set[int]]:
    """Comment text by line, and the lines that are only a comment."""
    comments: dict[int, str] = {}
    whole: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and not token.string.startswith(("# noqa", "# type:", "# pants:")):
            comments[token.start[0]] = token.string.lstrip("#").removeprefix(":").strip()
            if token.line[: token.start[1]].strip() == "":
                whole.add(token.start[0])
    return comments, whole
