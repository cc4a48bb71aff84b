"""reasoning-gym's own scorers, on the entry that the problem carries.

Nine of its scorers evaluate the answer as Python, which would run what a model writes. None of them gets such a text:

- four compare lists or boards (:data:`LISTS`, by ``eval``): their module has a parser of literals in its place;
- five compute with sympy (:data:`EXPRESSIONS`, by ``parse_expr``, which evaluates): they get only what
  :func:`is_expression` reads as arithmetic over numbers, symbols and named functions, in a process of its own for each
  answer. Any other text is scored as one that cannot be parsed.

A task of another version of the package whose scorer can evaluate text (:func:`evaluates`) is treated as the five.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import dis
import inspect
import math
import re
import sys
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, Literal

from kl_comedy.errors import UserError, bad_value
from kl_comedy.records import Reward
from kl_comedy.registry import REWARDS
from kl_comedy.rewards.base import Meta, in_child
from kl_comedy.rewards.text import answer_tag, nesting_depth

LISTS = ("binary_matrix", "n_queens", "spiral_matrix", "string_insertion")
"""Tasks whose scorer compares the text, and then evaluates it as a list."""
EXPRESSIONS = (
    "countdown",
    "intermediate_integration",
    "polynomial_multiplication",
    "puzzle24",
    "simple_integration",
)
"""Tasks whose scorer evaluates the text as an expression of sympy."""
OWN_TEXT = ("bitwise_arithmetic", "number_sorting")
"""Tasks whose scorer evaluates only text of the entry: the problem, or the right answer."""

CALLABLE = (
    "sin",
    "cos",
    "tan",
    "sec",
    "csc",
    "cot",
    "asin",
    "acos",
    "atan",
    "sinh",
    "cosh",
    "tanh",
    "exp",
    "log",
    "ln",
    "sqrt",
    "Abs",
    "abs",
    "factorial",
    "Rational",
)
"""The functions an evaluated answer may call."""
CONSTANTS = ("pi", "E", "I")
"""The names of sympy that an evaluated answer may use as values; every other name of sympy or Python is refused."""
EXPONENTIAL = ("exp", "sinh", "cosh")

MAX_EXPRESSION_CHARS = 4_000
MAX_EXPRESSION_DEPTH = 50
"""Bounds of an evaluated answer: sympy's parser and Python's compiler are recursive and slower than linear."""
MAX_BITS = 20_000
"""Bound on the size of numbers in an evaluated answer, found before they are computed: ``9**9**9`` has 10^9 bits."""
MAX_EXPONENT_BITS = 14
"""The largest exponent is below 2^14, so that the bound itself stays a finite float."""

NOT_PARSED = "?"
"""Replaces an answer that a scorer could only evaluate. No parser takes it, so it gets the score of such answers."""

_ENTRY = {"question": "State the final answer: 4 - 1 =", "answer": "3", "metadata": {"source_dataset": "chain_sum"}}


@REWARDS.register(
    "reasoning_gym",
    source="open-thought/reasoning-gym (Apache-2.0), dataset.score_answer",
    claims=("unit_interval",),
    isolated=True,
    boxed=False,
    imports=("reasoning_gym",),
    examples=(
        {"completion": " 3\n", "answer": "3", "value": 1.0, "meta": {"task": "chain_sum", "entry": _ENTRY}},
        {"completion": "4", "answer": "3", "value": 0.0, "meta": {"task": "chain_sum", "entry": _ENTRY}},
    ),
)
def reasoning_gym(
    completion: str,
    answer: str,
    meta: Meta,
    *,
    solved_at: float = 0.99,
    partial: bool = False,
    part: Literal["whole", "first_line", "last_line", "answer_tag"] = "whole",
    max_chars: int = 100_000,
) -> Reward:
    """1 where the task's own scorer gives the answer at least ``solved_at``, else 0; with ``partial`` the score itself.

    Reads ``meta["task"]`` and ``meta["entry"]``. ``part`` is what counts as the answer, stripped. ``refused``: longer
    than ``max_chars``, or code in an answer that the task's scorer would evaluate. The part ``score`` is the raw score.
    """
    if "task" not in meta or "entry" not in meta:
        raise UserError("the reward reasoning_gym needs problems of the dataset reasoning_gym (meta task and entry)")
    if len(completion) > max_chars:
        return Reward(value=0.0, status="refused")
    given = _answer_part(completion, part)
    if not given:
        return Reward(value=0.0, status="unparseable")
    name = str(meta["task"])
    score = _guarded_score(name, _task(name), given, dict(meta["entry"]))
    if score is None:
        return Reward(value=0.0, status="refused")
    value = float(score >= solved_at)
    if partial:
        value = score
    return Reward(value=value, parts={"score": score})


def _guarded_score(name: str, task: Any, given: str, entry: dict[str, Any]) -> float | None:
    """The task's score of the answer; None for code in an answer to a task whose scorer evaluates."""
    if name in LISTS:
        if not is_plain(given):
            return None
        # The scorer's own eval: a global of its module, which Python finds before the built-in function.
        vars(sys.modules[type(task).__module__])["eval"] = literal
        return _score(task, given, entry)

    evaluates_answer = name in EXPRESSIONS or evaluates(task.__class__)
    if name in OWN_TEXT or not evaluates_answer:
        return _score(task, given, entry)

    # The entry's own answer is the data's text, and may hold more than a model's may (an unsolved Integral).
    is_own_answer = given == str(entry.get("answer")).strip()
    if is_own_answer or is_expression(given):
        # Even an allowed expression leaves something behind: sympy's caches and assumptions.
        return in_child(lambda: _score(task, given, entry))
    if is_plain(given):
        return _score(task, NOT_PARSED, entry)
    return None


def _answer_part(completion: str, part: str) -> str:
    """The part of the completion that counts as the answer, stripped."""
    text = completion.strip()
    if part == "answer_tag":
        return answer_tag(text)
    if part == "whole" or not text:
        return text
    lines = text.split("\n")
    if part == "first_line":
        return lines[0].strip()
    return lines[-1].strip()


def _score(task: Any, given: str, entry: dict[str, Any]) -> float:
    """The task's score; 0 where the scorer fails on the answer's text, which it then has not accepted.

    Raises :class:`UserError` where it fails on the entry's own answer too: then the fault is the entry's.
    """
    try:
        return float(task.score_answer(given, entry))
    except (MemoryError, RecursionError):
        # The limits of this process, not a verdict on the text.
        raise
    except Exception:
        try:
            task.score_answer(entry["answer"], entry)
        except (MemoryError, RecursionError):
            raise
        except Exception as fault:
            raise UserError(f"the task's scorer cannot score its own entry {entry!r:.200}: {fault}") from fault
        return 0.0


@lru_cache(maxsize=128)
def _task(name: str) -> Any:
    """One dataset object of the task, for its scorer; all that the scorer needs to know is in the entry."""
    # The package prints while it is imported; in a command that prints JSON this must not reach stdout.
    with contextlib.redirect_stdout(sys.stderr):
        from reasoning_gym.factory import DATASETS as TASKS
    if name not in TASKS:
        raise bad_value("meta.task", name, sorted(TASKS))
    build, settings_type = TASKS[name]
    return build(config=settings_type(seed=0, size=1))


@lru_cache(maxsize=256)
def evaluates(task: type) -> bool:
    """Whether the task's scorer, or what it calls in its package, refers to an evaluating function or to sympy.

    Judged by the names in its byte code, so that ``re.compile`` or a method called ``eval`` does not count.
    """
    package = task.__module__.split(".")[0]
    pending: list[Any] = [task.score_answer]  # type: ignore[attr-defined]
    visited = set()
    while pending:
        function = pending.pop()
        if function in visited:
            continue
        visited.add(function)
        for operation, name in _names(function.__code__):
            target = _target(function, task, operation, name)
            defined_in = _defining_package(target)
            if target in (eval, exec, compile, __import__) or defined_in == "sympy":
                return True
            if defined_in == package:
                pending.extend(_functions_of(target))
    return False


def _target(function: Any, task: type, operation: str, name: str) -> Any:
    """What an instruction of ``function`` loads. An attribute is taken for one of the task: ``self.helper``."""
    if operation in ("LOAD_ATTR", "LOAD_METHOD"):
        return getattr(task, name, None)
    return function.__globals__.get(name, getattr(builtins, name, None))


def _defining_package(target: Any) -> str:
    """The first part of the name of a module, or of the module that defines ``target``."""
    if inspect.ismodule(target):
        module = target.__name__
    else:
        module = str(getattr(target, "__module__", None))
    return module.split(".")[0]


def _functions_of(target: Any) -> list[Any]:
    """The Python functions of a class, or of a function itself, with decorators and method objects taken off."""
    members = [target]
    if inspect.isclass(target):
        members = list(vars(target).values())
    functions = []
    for member in members:
        # A static or class method holds its function in __func__.
        function = getattr(member, "__func__", member)
        if callable(function):
            function = inspect.unwrap(function)
        if inspect.isfunction(function):
            functions.append(function)
    return functions


def _names(code: Any) -> Iterator[tuple[str, str]]:
    """Each instruction that loads a global name or an attribute, and the name; those of inner functions too."""
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_ATTR", "LOAD_METHOD"):
            yield instruction.opname, str(instruction.argval)
    for constant in code.co_consts:
        if inspect.iscode(constant):
            yield from _names(constant)


# --- What an answer may be --------------------------------------------------------------------------------------------

_ARITHMETIC = (ast.Expression, ast.BinOp, ast.UnaryOp, ast.Load, ast.Name, ast.operator, ast.unaryop)
_HARMLESS = (*_ARITHMETIC, ast.Constant, ast.List, ast.Tuple, ast.Compare, ast.cmpop, ast.BoolOp, ast.boolop)
_OPERATORS = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod, ast.Pow)
_PARSE_ERRORS = (SyntaxError, ValueError, RecursionError, MemoryError)


def literal(text: str) -> Any:
    """The value of a list, tuple, number or text written as in Python, nested or not; nothing is evaluated.

    Raises ValueError (or SyntaxError) for everything else.

    >>> literal("[['Q', '_'], (1, -2.5)]")
    [['Q', '_'], (1, -2.5)]
    """
    tree = ast.parse(text.strip(), mode="eval")
    # ast.literal_eval alone would also take sets and dicts, which the scorers do not expect.
    allowed = (ast.Expression, ast.List, ast.Tuple, ast.Constant, ast.UnaryOp, ast.USub, ast.UAdd, ast.Load)
    if not all(isinstance(node, allowed) for node in ast.walk(tree)):
        raise ValueError("an answer that is not a list of numbers or texts")
    return ast.literal_eval(tree)


def _tree(text: str) -> ast.Expression | None:
    """The syntax tree of ``text`` as a Python expression, with ``^`` as a power as in sympy; None for other texts."""
    # Python's parser gives up on deep nesting only after it has used much of the C stack.
    if nesting_depth(text) > MAX_EXPRESSION_DEPTH:
        return None
    try:
        return ast.parse(text.strip().replace("^", "**"), mode="eval")
    except _PARSE_ERRORS:
        return None


def is_plain(text: str) -> bool:
    """Whether ``text``, read as Python, holds no code: only numbers, words, lists of them, arithmetic, functions.

    This decides whether an answer that is not evaluated anyway counts as ``refused`` or as wrong.

    >>> [is_plain(text) for text in ("2*x + sin(x)", "Q _ _", "open('x')", "x.__class__", "(x := 1)")]
    [True, True, False, False, False]
    """
    # Dunders, comments, line continuations, decorators, statements, lambdas, attributes; look-alikes of letters.
    if re.search(r"__|[#\\`@;]|\blambda\b|\.\s*[^\W\d]", text) or not text.isascii():
        return False
    # Calls are checked in the text too: a text that Python cannot parse may hold one all the same.
    for opening in re.finditer(r"\(", text):
        if _opens_a_call(text[: opening.start()].rstrip()):
            return False
    tree = _tree(text)
    if tree is None:
        return True
    return all(_is_harmless(node) for node in ast.walk(tree))


def _opens_a_call(before: str) -> bool:
    """Whether a bracket after the text ``before`` calls something that is not in :data:`CALLABLE`."""
    if not before:
        return False
    name = re.search(r"[A-Za-z_]\w*$", before)
    if name is not None and name.group() in CALLABLE:
        return False
    return before[-1] not in "+-*/^%(,["


def _is_harmless(node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        return _is_named_call(node)
    if isinstance(node, ast.BinOp):
        # "a" * 10**9 and [0] * 10**9 would fill the memory.
        return not _is_text_or_list(node.left) and not _is_text_or_list(node.right)
    return isinstance(node, _HARMLESS)


def _is_text_or_list(node: ast.AST) -> bool:
    if isinstance(node, ast.Constant):
        return isinstance(node.value, str | bytes)
    return isinstance(node, ast.List | ast.Tuple)


def _is_named_call(node: ast.Call) -> bool:
    """Whether the callee is a bare name of :data:`CALLABLE`; keywords could switch on options of sympy."""
    return isinstance(node.func, ast.Name) and node.func.id in CALLABLE and not node.keywords


def is_expression(text: str) -> bool:
    """Whether ``text`` is arithmetic over numbers, symbols and :data:`CALLABLE` that sympy may evaluate.

    An allow-list of characters (no quotes, brackets, colons, or signs that sympy's parser rewrites, such as ``!``), of
    nodes of Python's syntax, of names (a function only as a callee, none of Python's or sympy's), and of sizes.

    >>> is_expression("2*x^3 + sin(x)/4"), is_expression("10**10**10"), is_expression("exp (open)"), is_expression("5!")
    (True, False, False, False)
    """
    if len(text) > MAX_EXPRESSION_CHARS or not re.fullmatch(r"[A-Za-z0-9_+\-*/%^().,\s]+", text):
        return False
    tree = _tree(text)
    if tree is None:
        return False
    callees = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        # The name of a callee is checked with its call.
        if id(node) not in callees and not _may_be_evaluated(node):
            return False
    # Before anything is computed: 10**10**10 would take all memory while it is evaluated.
    try:
        return _bits(tree.body) <= MAX_BITS
    except (_TooLarge, RecursionError):
        return False


def _may_be_evaluated(node: ast.AST) -> bool:
    """Whether a node of an answer's syntax tree, other than a callee, may reach sympy."""
    if isinstance(node, ast.Name):
        return _is_symbol(node.id)
    if isinstance(node, ast.Call):
        return _is_named_call(node)
    if isinstance(node, ast.Constant):
        return _is_finite_number(node.value)
    if isinstance(node, ast.operator):
        return isinstance(node, _OPERATORS)
    if isinstance(node, ast.unaryop):
        return isinstance(node, ast.UAdd | ast.USub)
    return isinstance(node, _ARITHMETIC)


def _is_finite_number(value: object) -> bool:
    """Whether a literal is a whole number of any size, or a float that is finite (``1e999`` is not)."""
    if isinstance(value, bool):
        return False
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, int)


def _is_symbol(name: str) -> bool:
    """Whether sympy takes ``name`` for a symbol or a constant."""
    if name in CONSTANTS:
        return True
    return name not in _taken_names() and "__" not in name


@lru_cache(maxsize=1)
def _taken_names() -> frozenset[str]:
    """Names that mean something where sympy evaluates."""
    import sympy

    return frozenset(dir(sympy)) | frozenset(dir(builtins))


class _TooLarge(Exception):
    """A number would have too many digits."""


def _bits(node: ast.expr) -> float:
    """An upper bound on the bits of the numbers that computing ``node`` makes. Raises :class:`_TooLarge`."""
    if isinstance(node, ast.Constant):
        bits = _bits_of_number(abs(node.value))  # type: ignore[arg-type]
    elif isinstance(node, ast.UnaryOp):
        bits = _bits(node.operand)
    elif isinstance(node, ast.BinOp):
        bits = _bits_of_operation(node)
    elif isinstance(node, ast.Call):
        bits = _bits_of_call(node)
    else:
        # A symbol, pi or E.
        bits = 2.0
    if bits > MAX_BITS:
        raise _TooLarge
    return bits


def _bits_of_number(value: float) -> float:
    if isinstance(value, int):
        return float(value.bit_length())
    if value == 0.0:
        return 1.0
    # A small float becomes a fraction with a large denominator.
    return abs(math.log2(value)) + 1


def _bits_of_operation(node: ast.BinOp) -> float:
    left = _bits(node.left)
    right = _bits(node.right)
    if not isinstance(node.op, ast.Pow):
        # Sums, products, and fractions of them.
        return left + right + 1
    # |b| < 2^left and |e| < 2^right give |b^e| < 2^(left * 2^right).
    return float(max(left, 1.0) * _two_to(right))


def _bits_of_call(node: ast.Call) -> float:
    assert isinstance(node.func, ast.Name)
    bits = max((_bits(argument) for argument in node.args), default=0.0)
    if node.func.id in EXPONENTIAL:
        # e < 2^2.
        return 2.0 * _two_to(bits)
    if node.func.id == "factorial":
        # n! has at most n log2(n) bits.
        return _two_to(bits) * max(bits, 1.0)
    # sin, log, sqrt of a number: sympy keeps them symbolic, or computes them at a fixed precision.
    return bits + 64.0


def _two_to(bits: float) -> float:
    """2^bits. Raises :class:`_TooLarge` where a bound of that many bits is over the limit anyway."""
    if bits > MAX_EXPONENT_BITS:
        raise _TooLarge
    return float(2.0**bits)
