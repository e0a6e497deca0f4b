"""What a recipe of Megatron-Bridge sets, by the source of its function: the functions of the package are followed by their syntax, and
nothing of it is imported or run. What only running it tells (a branch over the GPU at hand) is listed as unknown."""

from __future__ import annotations

import ast
import operator
import re
import sys
from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, NamedTuple

from orchestrator.audit.document import Content, leaves
from orchestrator.words.terms import section

NAME: Final = re.compile(r"\w+_(pretrain|sft|peft|lora|dora|finetune)_(\w+_)?config")
"""Names of Bridge's recipes (scripts/training/recipe_metadata.py, infer_recipe_mode)."""
MOST_CALLS: Final = 40
"""Functions in functions: the deepest of 0.6.2 are 6."""
PRETRAINED: Final = "_pretrained_"
"""The key of a model's configuration with the name of the checkpoint of Hugging Face's that it is made of."""
CLASS: Final = "_class_"
"""The key of an object with its class."""
UNKNOWN: Final = object()
"""What only running a function tells."""
OPERATORS: Final[dict[type, Callable[[Any, Any], Any]]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv, ast.Div: operator.truediv,
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Is: lambda a, b: a is b, ast.IsNot: lambda a, b: a is not b, ast.Lt: operator.lt,
    ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge, ast.In: lambda a, b: a in b, ast.NotIn: lambda a, b: a not in b,
}  # fmt: skip


def named(words: Sequence[str]) -> str:
    """The recipe that a command names (`--recipe NAME`, or `--model` with a `--mode`), or the first of the functions that a Python file
    calls; "": none.

    >>> named(("run_recipe.py", "--recipe=qwen3_8b_sft_config")), named(("print", "qwen3_8b_sft_config")), named(("get_config",))
    ('qwen3_8b_sft_config', 'qwen3_8b_sft_config', '')
    >>> named(("run_recipe.py", "--model", "qwen3_8b", "--mode", "lora"))
    'qwen3_8b_peft_config'
    """
    parts = [part for word in words for part in word.split("=", 1)]
    flags = dict(pairwise(parts))
    if "--recipe" in flags:
        return flags["--recipe"]
    if "--model" in flags and (mode := flags.get("--mode")):
        return f"{flags['--model']}_{'peft' if mode in ('lora', 'dora') else mode}_config"
    return next((word for word in words if NAME.fullmatch(word)), "")


def source_of(file: str) -> Path | None:
    """The folder of Megatron-Bridge's source, of the checkout in which the file is, else as it is installed; None: neither."""
    checkouts = [above / part for above in Path(file).resolve().parents for part in ("src", ".")]
    folders = (folder / "megatron/bridge" for folder in (*checkouts, *map(Path, sys.path)))
    return next((folder for folder in folders if (folder / "recipes").is_dir()), None)


class Set(NamedTuple):
    """What a recipe sets by sections, the checkpoint of Hugging Face's that its model is made of ("": not said), and the paths of which
    only running it tells the values."""

    content: Content
    model: str
    unknown: tuple[str, ...]


def read(root: Path, name: str, scheme: str = "") -> Set | None:
    """What the recipe of this name sets, in Bridge's source, with adapters of this kind where its function is told one; None: it has none
    of this name, or one that makes no configuration."""
    for folder in ("perf_recipes", "recipes"):  # scripts/training/recipe_runner.py, load_recipe: a benchmark's before the library's
        for path in sorted((root / folder).rglob("*.py")):
            if name in path.read_text(encoding="utf-8"):
                recipe = _Source(root).of(path, name)
                told = scheme and isinstance(recipe, _Function) and "peft_scheme" in ast.unparse(recipe.node.args)
                found = _Source(root).called(recipe, [], {"peft_scheme": scheme} if told else {})
                if isinstance(found, dict):
                    return _said(found)
    return None


def _said(config: Content) -> Set:
    unknown = tuple(path for path, value in leaves(config) if not _plain(value))
    made_of = section(config, "model").get(PRETRAINED)
    if isinstance(peft := config.get("peft"), dict):
        config = config | {"peft": {"scheme": peft.get(CLASS), **peft}}
    return Set(_known(config), made_of if isinstance(made_of, str) else "", unknown)


def _plain(value: Any) -> bool:
    return value is not UNKNOWN and not isinstance(value, _Function | _Class)


def _known(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _known(item) for key, item in value.items() if _plain(item) and key not in (PRETRAINED, CLASS)}
    return value


class _Function(NamedTuple):
    node: ast.FunctionDef
    path: Path


class _Class(NamedTuple):
    name: str


@cache
def _module(path: Path) -> dict[str, ast.stmt | ast.expr]:
    """What each top-level name of a module is: a function, a class, an import, or a value."""
    found: dict[str, ast.stmt | ast.expr] = {}
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found[node.name] = node
        elif isinstance(node, ast.ImportFrom):
            found |= {one.asname or one.name: node for one in node.names}
        elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {target.id: node.value for target in targets if isinstance(target, ast.Name)}
    return found


class _Source:
    """Bridge's functions, followed. Objects are dicts, which two names may share."""

    def __init__(self, root: Path) -> None:
        self.root, self.depth = root, 0

    def of(self, path: Path, name: str) -> Any:
        """What a module's name stands for."""
        node = _module(path).get(name)
        if isinstance(node, ast.FunctionDef):
            return _Function(node, path)
        if isinstance(node, ast.ClassDef):
            return _Class(name)
        if isinstance(node, ast.ImportFrom):
            return self.imported(node, name, path)
        return UNKNOWN if node is None else self.value(node, {}, path)  # type: ignore[arg-type]

    def imported(self, node: ast.ImportFrom, name: str, path: Path) -> Any:
        theirs = next(one.name for one in node.names if (one.asname or one.name) == name)
        module = (node.module or "").split(".")
        if node.level:
            folder = path.parents[node.level - 1].joinpath(*filter(None, module))
        elif module[:2] == ["megatron", "bridge"]:
            folder = self.root.joinpath(*module[2:])
        else:
            return _Class(theirs)
        files = [file for file in (folder.with_suffix(".py"), folder / "__init__.py") if file.is_file()]
        return self.of(files[0], theirs) if files else _Class(theirs)

    def called(self, what: Any, given: list[Any], by_name: Content) -> Any:
        """What a call gives: of a class its arguments by name."""
        if isinstance(what, _Class):
            return {CLASS: what.name, **by_name} if what.name[:1].isupper() else UNKNOWN
        if not isinstance(what, _Function) or self.depth >= MOST_CALLS:
            return UNKNOWN
        arguments = what.node.args
        positional = [one.arg for one in (*arguments.posonlyargs, *arguments.args)]
        defaults = [*zip(positional[len(positional) - len(arguments.defaults) :], arguments.defaults, strict=True)]
        defaults += [(one.arg, value) for one, value in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if value]
        names = {name: self.value(value, {}, what.path) for name, value in defaults}
        names |= dict(zip(positional, given, strict=False)) | by_name
        self.depth += 1
        try:
            return next(iter(self.run(what.node.body, names, what.path)), None)
        finally:
            self.depth -= 1

    def run(self, body: Sequence[ast.stmt], names: Content, path: Path) -> tuple[Any, ...]:
        """Follows statements. Returns the value that they return, if they do."""
        returned: tuple[Any, ...] = ()
        for node in body:
            if isinstance(node, ast.Return):
                returned = (None if node.value is None else self.value(node.value, names, path),)
            elif isinstance(node, ast.Assign):
                found = self.value(node.value, names, path)
                for target in node.targets:
                    self.put(target, found, names, path)
            elif isinstance(node, ast.AnnAssign) and node.value is not None:
                self.put(node.target, self.value(node.value, names, path), names, path)
            elif isinstance(node, ast.AugAssign):
                both = ast.BinOp(left=node.target, op=node.op, right=node.value)
                self.put(node.target, self.value(both, names, path), names, path)
            elif isinstance(node, ast.Expr):
                self.value(node.value, names, path)
            elif isinstance(node, ast.ImportFrom):
                names |= {one.asname or one.name: self.imported(node, one.asname or one.name, path) for one in node.names}
            elif isinstance(node, ast.If):
                returned = self.branch(node, names, path)
            elif isinstance(node, ast.With | ast.Try):
                returned = self.run(node.body, names, path)
            else:
                self.forget([node], names, path)
            if returned:
                break
        return returned

    def branch(self, node: ast.If, names: Content, path: Path) -> tuple[Any, ...]:
        """Follows the branch that is taken. Of one that may be, and does not end the function, nothing that it sets is known."""
        test = self.value(node.test, names, path)
        if test is not UNKNOWN:
            return self.run(node.body if test else node.orelse, names, path)
        for body in (node.body, node.orelse):
            if body and not isinstance(body[-1], ast.Return | ast.Raise):
                self.forget(body, names, path)
        return ()

    def forget(self, body: Sequence[ast.stmt], names: Content, path: Path) -> None:
        for node in (inner for one in body for inner in ast.walk(one)):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AugAssign) else []:
                self.put(target, UNKNOWN, names, path)

    def put(self, target: ast.expr, value: Any, names: Content, path: Path) -> None:
        if isinstance(target, ast.Name):
            names[target.id] = value
        elif isinstance(target, ast.Tuple):
            several = value if isinstance(value, tuple | list) and len(value) == len(target.elts) else [UNKNOWN] * len(target.elts)
            for one, item in zip(target.elts, several, strict=True):
                self.put(one, item, names, path)
        elif isinstance(target, ast.Attribute):
            within = self.value(target.value, names, path)
            if within is UNKNOWN or within is None:
                within = {}
                self.put(target.value, within, names, path)
            if isinstance(within, dict):
                within[target.attr] = value

    def value(self, node: ast.expr, names: Content, path: Path) -> Any:
        """What an expression is; UNKNOWN where only running it tells."""
        try:
            return self._value(node, names, path)
        except (TypeError, ValueError, KeyError, IndexError, AttributeError, ZeroDivisionError):
            return UNKNOWN

    def _value(self, node: ast.expr, names: Content, path: Path) -> Any:
        match node:
            case ast.Constant():
                return node.value
            case ast.Name():
                return names[node.id] if node.id in names else self.of(path, node.id)
            case ast.Attribute():
                within = self.value(node.value, names, path)
                if isinstance(within, dict):
                    return within.get(node.attr, UNKNOWN)
                return f"torch.{node.attr}" if isinstance(node.value, ast.Name) and node.value.id == "torch" else UNKNOWN
            case ast.Call():
                return self.call(node, names, path)
            case ast.List() | ast.Tuple():
                found = [self.value(one, names, path) for one in node.elts]
                return UNKNOWN if UNKNOWN in found else found if isinstance(node, ast.List) else tuple(found)
            case ast.Dict():
                keys = [None if key is None else self.value(key, names, path) for key in node.keys]
                return dict(zip(keys, [self.value(one, names, path) for one in node.values], strict=True))
            case ast.UnaryOp(op=ast.Not()):
                found = self.value(node.operand, names, path)
                return UNKNOWN if found is UNKNOWN else not found
            case ast.UnaryOp(op=ast.USub()):
                return -self.value(node.operand, names, path)
            case ast.BoolOp():
                ends = isinstance(node.op, ast.Or)  # the value at which the rest is not looked at
                several = [self.value(one, names, path) for one in node.values]
                ended = next((one for one in several if one is not UNKNOWN and bool(one) is ends), UNKNOWN)
                return ended if ended is not UNKNOWN or UNKNOWN in several else several[-1]
            case ast.BinOp() | ast.Compare():
                left, right = (node.left, node.right) if isinstance(node, ast.BinOp) else (node.left, node.comparators[0])
                op = node.op if isinstance(node, ast.BinOp) else node.ops[0]
                pair = [self.value(one, names, path) for one in (left, right)]
                return UNKNOWN if UNKNOWN in pair else OPERATORS[type(op)](*pair)
            case ast.IfExp():
                test = self.value(node.test, names, path)
                return UNKNOWN if test is UNKNOWN else self.value(node.body if test else node.orelse, names, path)
            case ast.Subscript():
                return self.value(node.value, names, path)[self.value(node.slice, names, path)]
        return UNKNOWN

    def call(self, node: ast.Call, names: Content, path: Path) -> Any:
        given = [self.value(one, names, path) for one in node.args]
        by_name = {word.arg: self.value(word.value, names, path) for word in node.keywords if word.arg}
        if isinstance(node.func, ast.Attribute):
            within = self.value(node.func.value, names, path)
            method = node.func.attr
            if method.startswith("from_hf_"):  # AutoBridge.from_hf_pretrained(NAME)
                return {PRETRAINED: given[0] if given else UNKNOWN}
            if isinstance(within, dict) and method.startswith(("to_", "get_")):  # ....to_megatron_provider(), ....get_model_config()
                return within
            return getattr(within, method)(*given) if isinstance(within, str | list) else UNKNOWN
        what = self.value(node.func, names, path)
        if isinstance(node.func, ast.Name) and what is UNKNOWN:
            return self.builtin(node.func.id, given)
        return self.called(what, given, by_name)

    def builtin(self, name: str, given: list[Any]) -> Any:
        of = given[0] if given else UNKNOWN
        if name == "getattr" and isinstance(of, dict):
            return of.get(given[1], UNKNOWN)
        if name == "hasattr" and isinstance(of, dict) and given[1] in of:
            return True
        if name == "isinstance" and of is not UNKNOWN:
            return isinstance(of, str) if given[1] is UNKNOWN else UNKNOWN
        return {"len": len, "list": list, "min": min, "max": max}[name](*given)  # type: ignore[operator]
