"""Whether a vLLM still is what this package was written against.

``data/vllm-<release>.json`` holds what the package relies on in one release of vLLM:
every name it imports, overrides, wraps or replaces, with signature and a hash of the
code. The first release's file holds all of it, a later one's what differs from the
release before, null for what is gone. vLLM is read as text, never imported, so a wheel
of another version will do. A release is recorded with

    python -m vllm_specinfer.seams FOLDER_OR_WHEEL

which prints what differs from the release before.
"""

import argparse
import ast
import hashlib
import json
import re
import zipfile
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

from vllm_specinfer import compat

PACKAGE = Path(__file__).parent
TABLES = PACKAGE / "data"
# What a hash leaves out, beside comments, whitespace and documentation.
_IGNORED_FIELDS = ("annotation", "returns", "ctx", "kind", "type_comment")

Seam = dict[str, str]
Table = dict[str, Seam]


class VllmSource:
    """The Python files of a vLLM package.

    Args:
        path: A folder that holds the package ``vllm``, that package, or a wheel.

    Raises:
        ValueError: There is no vLLM.
    """

    def __init__(self, path: Path) -> None:
        self._modules: dict[str, ast.Module | None] = {}
        if not path.exists():
            raise ValueError(f"--vllm-source must exist; got {path}")
        try:
            root: Any = zipfile.Path(path) if path.is_file() else path
        except zipfile.BadZipFile as error:
            raise ValueError(
                f"--vllm-source must be a folder or a wheel; got the file {path}"
            ) from error
        self._root = root if (root / "vllm").is_dir() else root.parent
        if not (self._root / "vllm" / "_version.py").is_file():
            raise ValueError(f"--vllm-source must hold the package vllm; got {path}")

    @cached_property
    def version(self) -> str:
        """As in ``vllm.__version__``."""
        text = (self._root / "vllm" / "_version.py").read_text("utf-8")
        found = re.search(r"^(?:__version__ = )?version = ['\"](.+?)['\"]", text, re.M)
        return found.group(1) if found else "unknown"

    def find(self, name: str) -> Seam | None:
        """What stands behind ``module:Class.attribute``, or None."""
        found = self._find(name)
        return None if found is None else _seam(found[1])

    def owner(self, module: str, class_name: str, attribute: str) -> str | None:
        """The class, ``module:Class``, that an attribute of a class comes from."""
        found = self._find(f"{module}:{class_name}")
        if found is None or not isinstance(found[1], ast.ClassDef):
            return None
        module, owner = found[0], found[1]
        if attribute in _definitions(owner.body):
            return f"{module}:{owner.name}"
        for base in owner.bases:
            name = ast.unparse(base.value if isinstance(base, ast.Subscript) else base)
            if (inherited := self.owner(module, name, attribute)) is not None:
                return inherited
        return None

    def helpers(self, name: str) -> set[str]:
        """The functions that a function of vLLM calls, and those that they call."""
        found: set[str] = set()
        left = [name]
        while left:
            module, node = self._find(left.pop()) or ("", ast.Pass())
            for inner in ast.walk(node):
                called = isinstance(inner, ast.Name) and self._find(
                    f"{module}:{inner.id}"
                )
                if called and isinstance(called[1], ast.FunctionDef):
                    helper = f"{called[0]}:{called[1].name}"
                    if helper not in found:
                        found.add(helper)
                        left.append(helper)
        return found

    def _find(self, name: str) -> tuple[str, ast.stmt] | None:
        """The module and statement that define a name, imports followed."""
        module, _, path = name.partition(":")
        head, _, rest = path.partition(".")
        tree = self._module(module)
        node = None if tree is None else _definitions(tree.body).get(head)
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            origin = next(a.name for a in node.names if head in (a.asname, a.name))
            return self._find(f"{node.module}:{origin}{'.' + rest if rest else ''}")
        if node is None:
            return None
        if not rest:
            return module, node
        owner = self.owner(module, head, rest)
        found = owner and self._find(owner)
        if not found or not isinstance(found[1], ast.ClassDef):
            return None
        return found[0], _definitions(found[1].body)[rest]

    def _module(self, name: str) -> ast.Module | None:
        if name not in self._modules:
            path = self._root.joinpath(*name.split("."))
            files = (path.parent / f"{path.name}.py", path / "__init__.py")
            text = next((f.read_text("utf-8") for f in files if f.is_file()), None)
            self._modules[name] = None if text is None else ast.parse(text)
        return self._modules[name]


def compare(source: VllmSource) -> list[str]:
    """A sentence for each name that is not as it was recorded.

    A vLLM of an unknown release is compared with the newest known one.
    """
    release = compat.release(source.version)
    return _differences(release or compat.SUPPORTED[-1], source)


def table(release: str) -> Table:
    """What the package relies on in one of `compat.SUPPORTED`."""
    merged: dict[str, Seam | None] = {}
    for known in compat.SUPPORTED[: compat.SUPPORTED.index(release) + 1]:
        merged |= json.loads(_file(known).read_text("utf-8"))
    return {name: seam for name, seam in sorted(merged.items()) if seam}


def record(source: VllmSource) -> Table:
    """What the package relies on in a vLLM.

    Raises:
        ValueError: A name is not there.
    """
    recorded: Table = {}
    for name in sorted(set(_names(source))):
        seam = source.find(name)
        if seam is None:
            raise ValueError(f"vLLM must have {name}; got {source.version} without it")
        recorded[name] = seam
    return recorded


def write(tables: dict[str, Table]) -> None:
    """Write every release's file.

    Args:
        tables: What the package relies on in each of `compat.SUPPORTED`, in order.
    """
    before: Table = {}
    for release, now in tables.items():
        names = sorted(before.keys() | now.keys())
        changed = {n: now.get(n) for n in names if now.get(n) != before.get(n)}
        text = json.dumps(changed, indent=1)
        _file(release).write_text(f"{text}\n", "utf-8")
        before = now


def _file(release: str) -> Path:
    return TABLES / f"vllm-{release}.json"


def _differences(release: str, source: VllmSource) -> list[str]:
    return [
        f"{name} {change}"
        for name, was in table(release).items()
        if (change := _change(was, source.find(name)))
    ]


def _change(was: Seam, now: Seam | None) -> str | None:
    if now is None:
        return "is gone"
    if now["is"] != was["is"]:
        old, new = was["is"].split(", "), now["is"].split(", ")
        parts = [f"-{p}" for p in old if p not in new]
        parts += [f"+{p}" for p in new if p not in old]
        return f"is not the same: {'  '.join(parts) or 'another order'}"
    return "has other code" if now["code"] != was["code"] else None


def _names(source: VllmSource) -> Iterator[str]:
    """Everything that the package relies on, as ``module:Class.attribute``."""
    from vllm_specinfer.kernels.cpu import step_kernels

    yield from compat.REQUIRED
    yield from compat.REQUIRED_IN_WORKER
    for short in step_kernels.REPLACEMENTS:
        module, _, kernel = step_kernels.kernel_name(short).rpartition(".")
        yield f"{module}:{kernel}"
        yield from source.helpers(f"{module}:{kernel}")
    for file in PACKAGE.rglob("*.py"):
        nodes = list(ast.walk(ast.parse(file.read_text("utf-8"))))
        imported: dict[str, str] = {
            alias.name: str(node.module)
            for node in nodes
            if isinstance(node, ast.ImportFrom)
            and (node.module or "").startswith("vllm.")
            for alias in node.names
        }
        for name, module in imported.items():
            if source.find(f"{module}:{name}") is not None:
                yield f"{module}:{name}"
        for node in nodes:
            if not isinstance(node, ast.ClassDef):
                continue
            for base in map(ast.unparse, node.bases):
                for attribute in _definitions(node.body):
                    origin = imported.get(base)
                    owner = origin and source.owner(origin, base, attribute)
                    if owner:
                        yield f"{owner}.{attribute}"


def _definitions(body: list[ast.stmt]) -> dict[str, ast.stmt]:
    """Names that a body binds, also inside ``if`` and ``try``; the first one counts."""
    found: dict[str, ast.stmt] = {}
    for node in body:
        names: list[str] = []
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names = [node.name]
        elif isinstance(node, ast.ImportFrom):
            names = [alias.asname or alias.name for alias in node.names]
        elif isinstance(node, ast.AnnAssign):
            names = [ast.unparse(node.target)]
        elif isinstance(node, ast.Assign):
            names = [ast.unparse(target) for target in node.targets]
        elif isinstance(node, ast.If | ast.Try):
            inner = [*node.body, *node.orelse]
            for handler in getattr(node, "handlers", ()):
                inner += handler.body
            found = _definitions(inner) | found
        found = dict.fromkeys(names, node) | found
    return found


def _seam(node: ast.stmt) -> Seam:
    """What a user of a definition sees of it, and a hash of the rest."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return {"is": f"def {_parameters(node.args)}", "code": _hash(node)}
    if isinstance(node, ast.ClassDef):
        # Methods have entries of their own, where it matters what they do.
        needed = [
            ast.unparse(field.target)
            for field in node.body
            if isinstance(field, ast.AnnAssign) and field.value is None
        ]
        # What a subclass must have to be built.
        needed += [
            f"{method.name}()"
            for method in node.body
            if isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef)
            and "abstractmethod" in map(ast.unparse, method.decorator_list)
        ]
        parts = [*map(ast.unparse, node.bases), *needed]
        return {"is": f"class {', '.join(parts)}", "code": ""}
    return {"is": ast.unparse(node).partition("=")[0].strip(), "code": _hash(node)}


def _parameters(arguments: ast.arguments) -> str:
    """The parameters with their defaults, without types."""
    bare = ast.parse(f"def f({ast.unparse(arguments)}): ...").body[0]
    for node in ast.walk(bare):
        if isinstance(node, ast.arg):
            node.annotation = None
    return ast.unparse(bare.args)  # type: ignore[attr-defined]


def _hash(node: ast.AST) -> str:
    return hashlib.sha256(repr(_plain(node)).encode()).hexdigest()[:16]


def _plain(value: Any) -> Any:
    """A syntax tree as nested lists, the same under every Python version."""
    if isinstance(value, list):
        return [_plain(v) for v in value if not _is_documentation(v)]
    if not isinstance(value, ast.AST):
        return repr(value)
    fields = (f for f in ast.iter_fields(value) if f[0] not in _IGNORED_FIELDS)
    # Newer versions of Python have more fields, empty here.
    kept = [(name, _plain(v)) for name, v in fields if v not in (None, [])]
    return [type(value).__name__, kept]


def _is_documentation(node: Any) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def main(path: str) -> None:
    """Record a release and print what differs from the one before."""
    source = VllmSource(Path(path))
    release = compat.release(source.version)
    if release is None:
        raise SystemExit(f"compat.SUPPORTED must name the release; got {path}")
    for before in compat.SUPPORTED[: compat.SUPPORTED.index(release)][-1:]:
        print(*_differences(before, source), sep="\n")
    # The others stay what they are: a file says what differs from the one before.
    known = [r for r in compat.SUPPORTED if r == release or _file(r).exists()]
    write({r: record(source) if r == release else table(r) for r in known})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("vllm", help="its folder or wheel")
    main(parser.parse_args().vllm)
