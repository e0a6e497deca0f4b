"""What a bash script would start, found without running it: assignments, arrays, tests, `case` and expansions, as launch scripts have them.

Every word keeps where its text stands in the file, so that a change of it is a change of those bytes. What can't be known without running
the script (a file's existence, a command's output, an argument of its own) is said, line by line. The grammar is tree-sitter's.
"""

from __future__ import annotations

import ast
import operator
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from orchestrator.errors import InputError

if TYPE_CHECKING:
    from tree_sitter import Node, Parser

Span = tuple[int, int]
"""First byte and the one behind the last."""
LAST_CONTINUED: Final = re.compile(rb"(?<!\\)\\(?:\n\s*)?\Z")
"""A backslash that continues the last line with nothing, which bash passes over."""
QUOTED: Final = re.compile(r"""(?<![^\s;&|(])\#[^\n]*|\\.|'[^']*(?:'|\Z)|"(?:\\.|[^"\\])*(?:"|\Z)""", re.DOTALL)
"""A comment, an escaped character, or a quoted text; one that is not closed ends with the script."""
ASSIGNS: Final = re.compile(r"(?:^|\s)\w+=[\"']\Z")


class Piece(NamedTuple):
    """A part of a word: its text; where that stands, if it stands in the file as it is; and where the expansion stands that it came by."""

    text: str
    at: int | None = None
    use: Span | None = None


class Word(NamedTuple):
    """One argument of a command, as the pieces that it is made of."""

    pieces: tuple[Piece, ...]

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.pieces)

    def own(self) -> Span | None:
        """The span of its whole text where that stands in one piece; None: nowhere."""
        if len(self.pieces) != 1 or self.pieces[0].at is None:
            return None
        return self.pieces[0].at, self.pieces[0].at + len(self.pieces[0].text.encode())

    def used(self) -> Span | None:
        """The span where it stands among the arguments: its text, or the expansion in its place."""
        if len(self.pieces) != 1:
            return None
        return self.pieces[0].use or self.own()

    def behind(self, count: int) -> Word:
        """The word without its first so many characters, whose span is nowhere where these are a part of an expansion."""
        pieces = []
        for piece in self.pieces:
            cut = min(count, len(piece.text))
            count -= cut
            at = None if piece.at is None else piece.at + len(piece.text[:cut].encode())
            pieces += [piece._replace(text=piece.text[cut:], at=at, use=None if cut else piece.use)] if cut < len(piece.text) else []
        return Word(tuple(pieces))


class Script(NamedTuple):
    """The words of `commands` in order; `variables` as they are at the end; `files`: here documents by where they go; `sbatch`: words of
    #SBATCH lines; `notes`: what was not decided or not followed; `broken`: where it may not be bash, "" if nowhere; `text`, `name`: its
    file's."""

    commands: tuple[tuple[Word, ...], ...]
    variables: dict[str, list[Word]]
    files: dict[str, str]
    sbatch: tuple[str, ...]
    notes: tuple[str, ...]
    broken: str = ""
    text: str = ""
    name: str = ""

    def lines(self, several: Callable[[str], object]) -> list[list[Word]]:
        """The words of each command and, last, of all variables. Words that hold `several`, as `sh -c "..."` has them, are divided."""
        every = [word for name, words in self.variables.items() if name != "_" for word in words]
        lines = (*self.commands, every)
        return [[part for word in line for part in (split(word.pieces) if several(word.text) else [word])] for line in lines]


MOST_BYTES: Final = 1_000_000
MOST_EXPANDED: Final = 1_000_000
"""Characters that expansions may put into a script; a word counts for ten more. Those of the samples of tests have 2,000."""
SBATCH: Final = re.compile(r"^#SBATCH\s+(\S[^#\n]*)", re.MULTILINE)
SIZES: Final = re.compile(r"WORLD_SIZE|N?(NUM_?)?(NODES|GPUS)|(N|NUM_)?(GPUS|PROCS?)_PER_NODE|NPROC_PER_NODE", re.IGNORECASE)
"""Variables that say how large the cluster is."""
INSIDE: Final = ("program", "list", "pipeline", "subshell", "compound_statement", "negated_command", "do_group", "variable_assignments",
                 "declaration_command", "ERROR")  # fmt: skip
"""Kinds of nodes whose children are statements, or nothing that is followed."""
NUMBERS: Final[dict[str, Callable[[int, int], bool]]] = {
    "-eq": operator.eq, "-ne": operator.ne, "-gt": operator.gt, "-ge": operator.ge, "-lt": operator.lt, "-le": operator.le,
    "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
}  # fmt: skip
"""Comparisons of numbers: of words, and of what stands in ((...))."""
MISREAD: Final = re.compile(rb"\]\*\$(\w+)")
"""A variable that the grammar takes for two words, as in [0]*$N+[1]*$M."""
SETTING: Final = (".sh", ".env", ".conf")
"""How names of sourced files end of whose absence a word is said."""
LONGEST: Final = 1000
"""Rounds of a loop that counts."""
DEEPEST: Final = 8
"""Functions and sourced files inside of each other."""
DIRNAME: Final = re.compile(r"""\$\(\s*dirname\s+(?:--\s+)?"?\$(?:\{BASH_SOURCE\[0\]\}|\{?BASH_SOURCE\}?|\{?0\}?)"?\s*\)""")
"""The folder of the script that says this."""
CHANGED: Final = re.compile(
    r"""\$\(\s*cd\s+(?:-P\s+)?(?:--\s+)?"?(?P<to>[^"$&;<>]+?)"?\s*(?:&?>\s*/dev/null(?:\s*2>&1)?)?\s*(?:&&|;)\s*pwd(?:\s+-P)?\s*\)"""
)
"""A folder, by the way to it."""
JOINED: Final = re.compile(r"""\$\(\s*IFS=['"](?P<by>[^'"])[^'"]*['"]\s*;\s*echo\s+"\$\{(?P<name>\w+)\[\*\]\}"\s*\)""")
"""The words of an array with a character between them."""
MOST_ITEMS: Final = 100_000
"""Items that a list in an expression may have."""
BINARY: Final[dict[type[ast.operator], Callable[[Any, Any], Any]]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod,
}  # fmt: skip


def evaluate(text: str) -> Any:
    """The value of whole numbers, and of lists of them, with + - * / % and brackets. Raises ValueError for other things.

    >>> evaluate("8*(2+1)"), evaluate("7 / 2"), evaluate("([0]*1+[1]*2)")
    (24, 3, [0, 1, 1])
    """

    def value(node: ast.expr) -> Any:
        if isinstance(node, ast.Constant) and type(node.value) is int:
            return node.value
        if isinstance(node, ast.List):
            return [value(one) for one in node.elts]
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -value(node.operand)
        if not isinstance(node, ast.BinOp) or type(node.op) not in BINARY:
            raise ValueError
        left, right = value(node.left), value(node.right)
        if {type(left), type(right)} == {list, int}:
            times, items = sorted((left, right), key=lambda one: isinstance(one, list))
            if times * len(items) > MOST_ITEMS:
                raise ValueError
        found = BINARY[type(node.op)](left, right)
        if isinstance(found, int) and abs(found) >= 2**63:  # bash's numbers end there
            raise ValueError
        return found

    try:
        return value(ast.parse(text.strip().replace("/", "//"), mode="eval").body)
    except (SyntaxError, TypeError, ZeroDivisionError, RecursionError, MemoryError):
        raise ValueError(text) from None


def calculate(text: str) -> int | None:
    """The whole number that bash makes of this; None: none that can be told."""
    try:
        found = evaluate(text)
    except ValueError:
        return None
    return found if isinstance(found, int) else None


def read(text: str, name: str = "") -> Script:
    """`name`: the script's file, whose folder says what it sources; "": it has none. Raises InputError where the grammar's package is not
    installed, or the script is too long."""
    try:
        import tree_sitter_bash
        from tree_sitter import Language, Parser
    except ImportError:
        why = "reading shell scripts needs tree-sitter: pip install -e '.[audit]'"
        raise InputError("audit", None, why) from None
    source = LAST_CONTINUED.sub(lambda found: b" " * len(found[0]), text.encode())
    if len(source) > MOST_BYTES:
        raise InputError("audit", None, f"the script has {len(source):,} bytes; at most {MOST_BYTES:,} are read")
    parser = Parser(Language(tree_sitter_bash.language()))
    tree = parser.parse(source)
    reader = _Reader(source, name, parser)
    try:
        reader.statement(tree.root_node)
        if tree.root_node.has_error:
            reader.note(next(_errors(tree.root_node), tree.root_node), "is not bash that could be read whole")
    except RecursionError:
        raise InputError("audit", None, "the script is nested too deep to be read") from None
    broken = unpaired(text) or (reader.notes[-1] if tree.root_node.has_error else "")
    sbatch = tuple(word for match in SBATCH.finditer(text) for word in match.group(1).replace("=", " ").split())
    return Script(tuple(reader.commands), reader.variables, reader.files, sbatch, tuple(dict.fromkeys(reader.notes)), broken, text, name)


def unpaired(text: str) -> str:
    """Which quote of a script that can't be read whole is not closed, by its line; "": that can't be told. One over several lines whose end
    stands behind NAME= is closed by the quote that opens the next.

    >>> unpaired('A="--x 1\\n--y 2\\nB="--z 3"\\n')
    'line 1: the quote that opens here is closed by that of line 3, which opens another'
    >>> unpaired("echo it's\\n"), unpaired('echo "fine"')
    ('line 1: the quote that opens here is never closed', '')
    """
    for match in QUOTED.finditer(text):
        found = match[0]
        first = text.count("\n", 0, match.start()) + 1
        if found[0] in "'\"" and (len(found) == 1 or found[-1] != found[0] or found.endswith("\\" + found[0])):
            return f"line {first}: the quote that opens here is never closed"
        if found[0] in "'\"" and "\n" in found and ASSIGNS.search(found):
            return f"line {first}: the quote that opens here is closed by that of line {first + found.count(chr(10))}, which opens another"
    return ""


def _errors(node: Node) -> Iterator[Node]:
    if node.type == "ERROR" or node.is_missing:
        yield node
    for child in node.children:
        if child.has_error:
            yield from _errors(child)


class _Reader:
    """Walks the statements, keeping variables."""

    def __init__(self, source: bytes, name: str, parser: Parser) -> None:
        self.source, self.name, self.parser = source, name, parser
        self.variables: dict[str, list[Word]] = {}
        self.functions: dict[str, Node] = {}
        self.commands: list[tuple[Word, ...]] = []
        self.files: dict[str, str] = {}
        self.notes: list[str] = []
        self.depth = 0
        self.spent = 0

    def spend(self, node: Node, words: Iterable[Word]) -> None:
        """Counts words that an expansion puts here once more. Raises InputError for more of them than any script needs."""
        self.spent += sum(10 + len(piece.text) for word in words for piece in (*word.pieces, Piece("")))
        if self.spent > MOST_EXPANDED:
            where = f"line {node.start_point[0] + 1}: its variables and functions grow to more than {MOST_EXPANDED:,} characters"
            raise InputError("audit", None, where)

    def text(self, node: Node) -> str:
        return self.source[node.start_byte : node.end_byte].decode(errors="replace")

    def note(self, node: Node, what: str) -> None:
        said = " ".join(self.text(node).split())
        shown = said if len(said) <= 60 else said[:57] + "..."
        self.notes.append(f"line {node.start_point[0] + 1}: `{shown}` {what}")

    # ---- statements

    def statement(self, node: Node) -> None:
        """Follows a statement: by the method that is called after its kind, or by what is inside of it."""
        if node.type in INSIDE:
            self.statements(node.named_children)
        elif (follow := getattr(self, f"on_{node.type}", None)) is not None:
            follow(node)

    def statements(self, nodes: Iterable[Node]) -> None:
        for node in nodes:
            self.statement(node)

    def on_function_definition(self, node: Node) -> None:
        name, body = node.child_by_field_name("name"), node.child_by_field_name("body")
        if name is not None and body is not None:
            self.functions[self.text(name)] = body

    def on_for_statement(self, node: Node) -> None:
        variable, body = node.child_by_field_name("variable"), node.child_by_field_name("body")
        if variable is not None:
            values = [word for child in node.children_by_field_name("value") for word in self.expand(child)]
            self.note(variable, f"of a loop has its first value only, {values[0].text if values else 'none'}")
            self.variables[self.text(variable)] = values[:1]
        if body is not None:
            self.statement(body)

    def on_c_style_for_statement(self, node: Node) -> None:
        """Walks `for ((i = 0; i < N; i++))` as often as it goes round; another one, or one of more rounds than LONGEST, not at all."""
        first, condition, update, body = (node.child_by_field_name(name) for name in ("initializer", "condition", "update", "body"))
        if first is None or condition is None or update is None or body is None or not self.text(update).endswith("++"):
            return
        self.statement(first)
        name = self.text(update).removesuffix("++")
        for _ in range(LONGEST):
            count = self.reckoned(name)
            if count is None or not self.test(condition):
                return
            self.statement(body)
            self.variables[name] = [Word((Piece(str(count + 1)),))]

    def sourced(self, node: Node, named: str) -> None:
        """Takes over what the script sets that is sourced here; its text is no place for a change. One that is not here is said."""
        file = Path(self.name).absolute().parent / named
        if not self.name or "$" in named or not file.is_file() or file.stat().st_size > MOST_BYTES or self.depth >= DEEPEST:
            if named.endswith(SETTING):  # and is no environment of a machine
                self.note(node, "is not here: what it sets is not known")
            return
        there = _Reader(MISREAD.sub(rb"]*${\1}", file.read_bytes()), str(file), self.parser)
        there.variables, there.depth, there.spent = dict(self.variables), self.depth + 1, self.spent
        there.statement(self.parser.parse(there.source).root_node)
        self.spent = there.spent
        changed = {name: words for name, words in there.variables.items() if words is not self.variables.get(name)}
        self.variables |= {name: [Word((Piece(word.text),)) for word in words] for name, words in changed.items()}
        self.notes += [f"{file.name}, {line}" for line in there.notes]

    def on_variable_assignment(self, node: Node) -> None:
        name, value = node.child_by_field_name("name"), node.child_by_field_name("value")
        if name is None:
            return
        if name.type == "subscript":
            self.note(node, "sets one element of an array: not followed")
            return
        adds = any(child.type == "+=" for child in node.children)
        before = self.variables.get(self.text(name), []) if adds else []
        self.spend(node, before)
        if value is not None and value.type == "array":
            words = [word for child in value.named_children if child.type != "comment" for word in self.expand(child)]
            self.variables[self.text(name)] = before + words
        else:
            joined = [piece for word in before for piece in word.pieces]
            self.variables[self.text(name)] = [Word((*joined, *(() if value is None else self.pieces(value))))]

    def on_command(self, node: Node) -> None:
        name = node.child_by_field_name("name")
        words: list[Word] = []
        for child in node.named_children:
            if child.type not in ("variable_assignment", "herestring_redirect", "file_redirect", "comment"):
                words += self.expand(child.named_children[0] if child == name and child.named_children else child)
        if not words:
            return
        called = words[0].text
        if self.depth:
            self.spend(node, words)
        if called in ("source", ".") and len(words) > 1:
            self.sourced(node, words[1].text)
        if called == "printf" and len(words) == 5 and words[1].text == "-v":
            self.variables[words[2].text] = [Word((Piece(words[3].text.replace("%s", words[4].text)),))]
        if called in self.functions and self.depth < DEEPEST:
            self.depth += 1
            for index, word in enumerate(words[1:], 1):
                self.variables[str(index)] = [word]
            self.statement(self.functions[called])
            self.depth -= 1
        self.commands.append(tuple(words))

    def on_redirected_statement(self, node: Node) -> None:
        body = node.child_by_field_name("body")
        if body is not None:
            self.statement(body)
        redirects = node.children_by_field_name("redirect")
        for redirect in redirects:
            if redirect.type == "heredoc_redirect":
                self.document(redirect, redirects)

    def document(self, redirect: Node, beside: Sequence[Node]) -> None:
        """A here document goes to the file that the same line names."""
        parts = {child.type: child for child in reversed((*redirect.children, *beside))}
        target, body, start = (parts.get(kind) for kind in ("file_redirect", "heredoc_body", "heredoc_start"))
        destination = None if target is None else target.child_by_field_name("destination")
        if destination is None or body is None:
            return
        quoted = start is not None and self.text(start)[:1] in "'\"\\"
        text = self.text(body) if quoted else "".join(piece.text for piece in self.inside(body))
        self.files["".join(word.text for word in self.expand(destination))] = text

    # ---- conditions

    def on_if_statement(self, node: Node) -> None:
        """Walks the first branch whose condition holds. One that can't be decided counts as false, and is said."""
        others = [child for child in node.children if child.type in ("elif_clause", "else_clause")]
        for clause in (node, *others):
            conditions = clause.named_children[:1] if clause.type == "elif_clause" else clause.children_by_field_name("condition")
            if clause.type == "else_clause" or self.truth(conditions):
                self.statements(child for child in clause.named_children if child not in conditions and child not in others)
                return

    def truth(self, conditions: Sequence[Node]) -> bool | None:
        nodes = [node for node in conditions if node.is_named]
        found = self.test(nodes[-1]) if nodes else None
        if found is None and nodes:
            self.note(nodes[-1], "can't be decided here: taken as false")
        return found

    def test(self, node: Node) -> bool | None:
        kind = node.type
        if kind == "compound_statement":  # ((...)), or commands
            return self.test(node.named_children[0]) if self.text(node).startswith("((") and node.named_children else None
        if kind in ("test_command", "parenthesized_expression", "list") and node.named_children:
            if kind == "list":
                left, right = self.test(node.named_children[0]), self.test(node.named_children[-1])
                return _joined(next((child.type for child in node.children if child.type in ("&&", "||")), "&&"), left, right)
            return self.test(node.named_children[0])
        if kind in ("unary_expression", "negated_command") and node.named_children:
            sign = node.child_by_field_name("operator")
            operation = self.text(sign) if sign is not None else "!"
            if operation == "!" or kind == "negated_command":
                inner = self.test(node.named_children[-1])
                return None if inner is None else not inner
            value = self.value(node.named_children[-1])
            return value == "" if operation == "-z" else value != "" if operation == "-n" else None
        if kind == "binary_expression":
            return self.compared(node)
        if kind in ("word", "string", "simple_expansion", "expansion", "number", "concatenation"):
            return self.value(node) != ""
        if kind == "command":
            return {"true": True, ":": True, "false": False}.get(self.text(node))
        return None

    def compared(self, node: Node) -> bool | None:
        sign = node.child_by_field_name("operator")
        left, right = node.child_by_field_name("left"), node.child_by_field_name("right")
        if sign is None or left is None or right is None:
            return None
        operation = self.text(sign)
        if operation in ("&&", "||", "-a", "-o"):
            return _joined("&&" if operation in ("&&", "-a") else "||", self.test(left), self.test(right))
        if operation in ("=", "==", "!="):
            return fnmatchcase(self.value(left), self.value(right)) == (operation != "!=")
        if operation not in NUMBERS:
            return None
        a, b = (calculate(self.value(one)) if operation[0] == "-" else self.reckoned(self.text(one)) for one in (left, right))
        return None if a is None or b is None else NUMBERS[operation](a, b)

    def value(self, node: Node) -> str:
        """The text that a test sees: empty for a variable that nobody has set."""
        return "".join("" if piece.at is None and piece.text.startswith("$") else piece.text for piece in self.pieces(node))

    def on_case_statement(self, node: Node) -> None:
        value = node.child_by_field_name("value")
        if value is None:
            return
        said = self.value(value)
        for item in (child for child in node.named_children if child.type == "case_item"):
            patterns = item.children_by_field_name("value")
            if any(fnmatchcase(said, self.text(pattern).strip("'\"")) for pattern in patterns):
                self.statements(child for child in item.named_children if child not in patterns)
                return

    # ---- words

    def expand(self, node: Node) -> list[Word]:
        """The arguments that this node becomes: unquoted expansions are divided at blanks."""
        kind = node.type
        if kind in ("simple_expansion", "expansion"):
            whole = self.array_of(node)
            if whole is not None:
                return [part for word in whole for part in split(word.pieces)]
            return split(self.pieces(node))
        kinds = {child.type for child in node.named_children}
        if kind == "concatenation" and kinds & {"simple_expansion", "expansion"} and not kinds & {"string", "raw_string"}:
            return split(self.pieces(node))
        if kind == "string":
            inner = node.named_children
            if len(inner) == 1 and inner[0].type == "expansion" and (whole := self.array_of(inner[0])) is not None:
                return list(whole)
        return [Word(tuple(self.pieces(node)))]

    def array_of(self, node: Node) -> list[Word] | None:
        """The words of ${NAME[@]} and ${NAME[*]}; None: it is something else."""
        inner = node.named_children[0] if node.named_children else None
        if inner is None or inner.type != "subscript" or len(node.named_children) != 1:
            return None
        name, index = inner.child_by_field_name("name"), inner.child_by_field_name("index")
        if name is None or index is None or self.text(index) not in ("@", "*"):
            return None
        found = self.variables.get(self.text(name), [])
        self.spend(node, found)
        return found

    def pieces(self, node: Node) -> tuple[Piece, ...]:
        kind = node.type
        if kind == "string":
            return tuple(self.inside(node, node.start_byte + 1, node.end_byte - 1))
        if kind == "raw_string":
            return (Piece(self.text(node)[1:-1], node.start_byte + 1),)
        if kind in ("ansi_c_string", "translated_string"):
            return (Piece(self.text(node).strip("$'\"")),)
        if kind == "concatenation":
            return tuple(piece for child in node.children for piece in self.pieces(child))
        if kind == "arithmetic_expansion":
            inner = "".join(piece.text for piece in self.inside(node, node.start_byte + 3, node.end_byte - 2))
            value = self.reckoned(inner)
            return (Piece(self.text(node) if value is None else str(value), None, (node.start_byte, node.end_byte)),)
        if kind in ("simple_expansion", "expansion"):
            return self.expansion(node)
        if kind == "command_substitution":
            return (Piece(self.output(node), None, (node.start_byte, node.end_byte)),)
        text = self.text(node)
        if "\\" in text:
            return (Piece(text.replace("\\\n", "").replace("\\", "")),)
        return (Piece(text, node.start_byte),)

    def reckoned(self, text: str) -> int | None:
        """The whole number that bash makes of this text with the variables that it names; None: none that can be told."""
        return calculate(
            re.sub(r"[A-Za-z_]\w*", lambda name: "".join(w.text for w in self.variables.get(name.group(), [])) or name.group(), text)
        )

    def output(self, node: Node) -> str:
        """What $(expr ...), $(echo ...) or the same in backticks prints, and what says the script's folder; of other commands their own
        text, as $(...)."""
        here = str(Path(self.name).absolute().parent)
        said = DIRNAME.sub(lambda _: here, self.text(node)) if self.name else ""
        if (moved := CHANGED.fullmatch(said)) is not None:
            said = os.path.normpath(os.path.join(here, moved["to"]))
        if said and "$(" not in said:
            return said
        joined = JOINED.fullmatch(self.text(node))
        if joined is not None:
            return joined["by"].join(word.text for word in self.variables.get(joined["name"], []))
        inner = node.named_children[0] if node.named_child_count == 1 else None
        if inner is not None and inner.type == "command":
            called, *words = [word.text for child in inner.named_children for word in self.expand(child)]
            if called == "echo" and not any(word.startswith(("-", "$")) for word in words):
                return " ".join(words)
            value = calculate(" ".join(words)) if called == "expr" else None
            if value is not None:
                return str(value)
        text = self.text(node)
        return f"$({text[1:-1]})" if text.startswith("`") else text

    def expansion(self, node: Node) -> tuple[Piece, ...]:
        """The pieces that $NAME, ${NAME} and ${NAME:-default} become. Where nobody has set a variable the text stays as it is."""
        span = (node.start_byte, node.end_byte)
        unset = (Piece(self.text(node), None, span),)
        if not node.named_children:
            return unset
        inner = node.named_children[0]
        name = self.text(inner)
        value: list[Word] | None = self.array_of(node) if inner.type == "subscript" else self.variables.get(name)
        unset_too = any(word.text.startswith("$") and all(piece.at is None for piece in word.pieces) for word in value or ())
        known = value is not None and any(word.text for word in value) and not unset_too
        signs = {child.type for child in node.children}
        if signs & {":-", "-", ":=", "="} and not known:
            found = tuple(piece for child in node.named_children[1:] for piece in self.pieces(child))
            return tuple(piece._replace(use=piece.use or span) for piece in found) or (Piece("", None, span),)
        if signs & {":+", "+"}:
            return tuple(p for child in node.named_children[1:] for p in self.pieces(child)) if known else (Piece("", None, span),)
        if value is None or signs & {"#", "##", "%", "%%", "/", "//", "^", "^^", ",", ",,", "@", "!"}:
            return unset
        self.spend(node, value)
        if SIZES.fullmatch(name):  # is no place to change what else is as large
            return (Piece(" ".join(word.text for word in value), None, span),)
        pieces: list[Piece] = []
        for index, word in enumerate(value):
            pieces += [Piece(" ")] if index else []
            pieces += [piece._replace(use=piece.use or span) for piece in word.pieces]
        return tuple(pieces)

    def inside(self, node: Node, start: int | None = None, end: int | None = None) -> Iterator[Piece]:
        """The pieces of literal text between the expansions in a string or document."""
        at = node.start_byte if start is None else start
        stop = node.end_byte if end is None else end
        for child in node.named_children:
            if child.type in ("simple_expansion", "expansion", "command_substitution", "arithmetic_expansion"):
                yield from self.literal(at, child.start_byte)
                yield from self.pieces(child)
                at = child.end_byte
            elif child.type == "binary_expression" or child.named_child_count:
                yield from self.inside(child, at, child.end_byte)
                at = child.end_byte
        yield from self.literal(at, stop)

    def literal(self, start: int, end: int) -> Iterator[Piece]:
        """A continued line becomes blanks of the same length; other escapes end a piece."""
        raw = self.source[start:end].decode(errors="replace").replace("\\\n", "  ")
        at = start
        for part in re.split(r"(\\[\"$`\\])", raw):
            if part:
                escape = len(part) == 2 and part[0] == "\\"
                yield Piece(part[1], None) if escape else Piece(part, at)
            at += len(part.encode())


def _joined(sign: str, left: bool | None, right: bool | None) -> bool | None:
    ends = sign == "||"  # the value of one side that is that of both
    return ends if ends in (left, right) else None if None in (left, right) else not ends


def edited(text: str, edits: Iterable[tuple[Span, bytes]]) -> str:
    """The text with other bytes at these spans, of which none is within another; where there are none the blanks before them go, too.

    >>> edited("--tp 4 --pp 2", [((5, 6), b"16"), ((7, 13), b"")])
    '--tp 16'
    """
    source = text.encode()
    for (start, end), new in sorted(edits, key=lambda edit: edit[0], reverse=True):
        start, end = (start, end) if new else _line_of(source, start, end)
        source = source[:start] + new + source[end:]
    return source.decode()


def _line_of(source: bytes, start: int, end: int) -> Span:
    """The span with the blanks before it, or the whole line where nothing else is on it."""
    begin = source.rfind(b"\n", 0, start) + 1
    stop = source.find(b"\n", end)
    stop = len(source) if stop < 0 else stop
    if not source[begin:start].strip() and source[end:stop].strip() in (b"", b"\\"):
        return begin, min(stop + 1, len(source))
    while start > begin and source[start - 1 : start] in b" \t":
        start -= 1
    return start, end


def split(pieces: Iterable[Piece]) -> list[Word]:
    """Words between blanks, each part with its place.

    >>> [word.text for word in split([Piece("--a 1 --b", 10), Piece("=2")])]
    ['--a', '1', '--b=2']
    """
    words: list[Word] = []
    current: list[Piece] = []
    for piece in pieces:
        at = 0
        for part in re.findall(r"\s+|\S+", piece.text):
            if part.isspace():
                if current:
                    words.append(Word(tuple(current)))
                current = []
            else:
                place = None if piece.at is None else piece.at + len(piece.text[:at].encode())
                current.append(Piece(part, place, piece.use if part == piece.text or piece.at is None else None))
            at += len(part)
    if current:
        words.append(Word(tuple(current)))
    return words
