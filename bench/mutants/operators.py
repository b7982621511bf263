"""Small changes of a source file, each of which some test ought to notice. `OPERATORS` lists the kinds.

What only people read is left alone: texts, docstrings, what an error says, prints and logs, annotations and imports.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

OPERATORS = {
    "compare": "< and <=, > and >= swapped; each turned round; == and !=, in and not in, is and is not swapped",
    "arithmetic": "+ and -, * and //, << and >>, & and | swapped; / and ** to *, % to //; also in x += y",
    "boolean": "and and or swapped",
    "negation": "not x and -x to x",
    "number": "an integer one more, one less",
    "constant": "True and False swapped",
    "condition": "what an if, a ternary or a comprehension asks to True, to False; of a while to False",
    "return": "what is returned to None; of what returns True or False, to the other",
    "statement": "a call, an x += y, an assignment to a part or attribute, a raise, a break or a continue left out",
    "call": "min and max, any and all, minimum and maximum, left and right of searchsorted swapped; sorted to list",
    "slice": "a bound left out; the first bound one further",
}
COMPARE = {
    ast.Lt: (ast.LtE, ast.GtE), ast.LtE: (ast.Lt, ast.Gt), ast.Gt: (ast.GtE, ast.LtE), ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,), ast.NotEq: (ast.Eq,), ast.In: (ast.NotIn,), ast.NotIn: (ast.In,), ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
}  # fmt: skip
ARITHMETIC = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult,
    ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult, ast.LShift: ast.RShift, ast.RShift: ast.LShift, ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}  # fmt: skip
CALLS = {
    "min": "max", "max": "min", "any": "all", "all": "any", "sorted": "list", "minimum": "maximum",
    "maximum": "minimum", "argmin": "argmax", "argmax": "argmin",
}  # fmt: skip
SIDES = {"left": "right", "right": "left"}
SPOKEN = ("print", "warn", "warning", "info", "debug", "note", "log")  # calls that only people hear


@dataclass(frozen=True)
class Mutant:
    """One change of one file.

    Attributes:
        line: from 1; `text` is what stands there, and `becomes` what will, both stripped.
        before, after: the part that changes, on one line.
        source: the whole file, changed.
    """

    path: str
    line: int
    text: str
    operator: str
    before: str
    after: str
    becomes: str
    source: str

    @property
    def where(self) -> str:
        return f"{self.path}:{self.line}"


def mutants_of(path: str, root: Path) -> list[Mutant]:
    """Every change of a file, in the order of the file."""
    raw = (root / path).read_bytes()
    lines = raw.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    found: dict[bytes, Mutant] = {}
    for operator, node, after in _changes(ast.parse(raw)):
        first = starts[node.lineno - 1] + node.col_offset
        last = starts[(node.end_lineno or node.lineno) - 1] + (node.end_col_offset or 0)
        new = ast.unparse(after)
        if isinstance(node, ast.expr) and isinstance(after, ast.BinOp | ast.BoolOp | ast.Compare | ast.IfExp):
            new = f"({new})"
        source = raw[:first] + new.encode() + raw[last:]
        before, new = (" ".join(text.split()) for text in (raw[first:last].decode(), new))
        text, becomes = (code.splitlines()[node.lineno - 1].decode().strip() for code in (raw, source))
        if source != raw and source not in found:
            found[source] = Mutant(path, node.lineno, text, operator, before, new, becomes, source.decode())
    return sorted(found.values(), key=lambda m: (m.line, m.before, m.operator, m.after))


def _changes(tree: ast.Module) -> Iterator[tuple[str, ast.expr | ast.stmt, ast.expr | ast.stmt]]:
    """(operator, what stands there, what stands there instead)."""
    for node in _read_by_machines(tree):
        if isinstance(node, ast.expr):
            yield from _of_expression(node)
        elif isinstance(node, ast.stmt):
            yield from _of_statement(node)
        test = getattr(node, "test", None)
        if isinstance(node, ast.If | ast.IfExp):
            yield from (("condition", node.test, _value(v)) for v in (True, False))
        elif isinstance(node, ast.While) and isinstance(test, ast.expr):
            yield "condition", test, _value(False)
        elif isinstance(node, ast.comprehension):
            yield from (("condition", one, _value(v)) for one in node.ifs for v in (True, False))


def _of_expression(node: ast.expr) -> Iterator[tuple[str, ast.expr, ast.expr]]:
    if isinstance(node, ast.Compare):
        for place, sign in enumerate(node.ops):
            for other in COMPARE[type(sign)]:
                signs = [*node.ops[:place], other(), *node.ops[place + 1 :]]
                yield "compare", node, ast.Compare(node.left, signs, node.comparators)
    elif isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC and not _is_type(node):
        yield "arithmetic", node, ast.BinOp(node.left, ARITHMETIC[type(node.op)](), node.right)
    elif isinstance(node, ast.BoolOp):
        other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        yield "boolean", node, ast.BoolOp(other, node.values)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub):
        yield "negation", node, node.operand
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield "constant", node, _value(not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int):
        yield from (("number", node, _value(node.value + by)) for by in (1, -1))
    elif isinstance(node, ast.Call):
        yield from _of_call(node)
    elif isinstance(node, ast.Slice):
        yield from _of_slice(node)


def _of_call(node: ast.Call) -> Iterator[tuple[str, ast.expr, ast.expr]]:
    name = node.func
    if isinstance(name, ast.Name) and name.id in CALLS:
        other: ast.expr = ast.Name(CALLS[name.id], ast.Load())
        # what list() does not take
        keywords = node.keywords if name.id != "sorted" else []
        yield "call", node, ast.Call(other, node.args, keywords)
    elif isinstance(name, ast.Attribute) and name.attr in CALLS:
        yield "call", node, ast.Call(ast.Attribute(name.value, CALLS[name.attr], ast.Load()), node.args, node.keywords)
    for place, argument in enumerate(node.args):
        if isinstance(argument, ast.Constant) and argument.value in SIDES:
            changed = [*node.args[:place], _value(SIDES[argument.value]), *node.args[place + 1 :]]
            yield "call", node, ast.Call(name, changed, node.keywords)
    for word in node.keywords:
        if word.arg == "side" and isinstance(word.value, ast.Constant) and word.value.value in SIDES:
            yield "call", word.value, _value(SIDES[word.value.value])


def _of_slice(node: ast.Slice) -> Iterator[tuple[str, ast.expr, ast.expr]]:
    if node.lower is not None:
        yield "slice", node, ast.Slice(None, node.upper, node.step)
    if node.upper is not None:
        yield "slice", node, ast.Slice(node.lower, None, node.step)
        if node.lower is None:
            yield "slice", node, ast.Slice(_value(1), node.upper, node.step)


def _of_statement(node: ast.stmt) -> Iterator[tuple[str, ast.stmt, ast.stmt]]:
    if isinstance(node, ast.Return) and node.value is not None:
        value = node.value
        if isinstance(value, ast.Constant) and isinstance(value.value, bool):
            return  # "constant" has it
        if not (isinstance(value, ast.Constant) and value.value is None):
            yield "return", node, ast.Return(_value(None))
        if isinstance(value, ast.Compare | ast.BoolOp) or (isinstance(value, ast.UnaryOp) and _is_not(value)):
            yield from (("return", node, ast.Return(_value(v))) for v in (True, False))
    elif isinstance(node, ast.AugAssign) and type(node.op) in ARITHMETIC:
        yield "arithmetic", node, ast.AugAssign(node.target, ARITHMETIC[type(node.op)](), node.value)
    parts = isinstance(node, ast.Assign) and all(isinstance(t, ast.Subscript | ast.Attribute) for t in node.targets)
    called = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    if parts or called or isinstance(node, ast.AugAssign | ast.Raise | ast.Break | ast.Continue):
        yield "statement", node, ast.Pass()


def _read_by_machines(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes below that mean something when the program runs."""
    for child in _children(node):
        if isinstance(child, ast.Import | ast.ImportFrom | ast.JoinedStr):
            continue
        if isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant | ast.Yield):
            continue  # a docstring; a generator's pause
        if isinstance(child, ast.Expr) and _is_spoken(child.value):
            continue
        yield child
        if not isinstance(child, ast.Raise):  # what an error says
            yield from _read_by_machines(child)


def _children(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.FunctionDef):
        yield from node.args.defaults
        yield from (one for one in node.args.kw_defaults if one is not None)
        yield from node.body
    elif isinstance(node, ast.AnnAssign):
        yield from [node.value] if node.value is not None else []
    elif isinstance(node, ast.ClassDef):
        yield from node.body
    elif isinstance(node, ast.Assert):
        return  # it states what holds
    else:
        yield from ast.iter_child_nodes(node)


def _is_spoken(node: ast.expr) -> bool:
    name = node.func if isinstance(node, ast.Call) else None
    return (isinstance(name, ast.Name) and name.id in SPOKEN) or (
        isinstance(name, ast.Attribute) and name.attr in SPOKEN
    )


def _is_type(node: ast.expr) -> bool:
    """A union of types, as in isinstance(x, A | B)."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return _is_type(node.left) or _is_type(node.right)
    name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
    return (name[:1].isupper() and not name.isupper()) or name in ("int", "str", "slice")


def _is_not(node: ast.UnaryOp) -> bool:
    return isinstance(node.op, ast.Not)


def _value(value: bool | int | str | None) -> ast.expr:
    if isinstance(value, int) and not isinstance(value, bool) and value < 0:
        return ast.UnaryOp(ast.USub(), ast.Constant(-value))
    return ast.Constant(value)
