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
"""Tasks whose scorer evaluates, but only text of the entry: the problem, or the right answer."""

CALLABLE = (
    *("sin", "cos", "tan", "sec", "csc", "cot", "asin", "acos", "atan", "sinh", "cosh", "tanh"),
    *("exp", "log", "ln", "sqrt", "Abs", "abs", "factorial", "Rational"),
)
"""The functions an evaluated answer may call."""
CONSTANTS = ("pi", "E", "I")
"""What sympy has under a name that an evaluated answer may use; every other name there or in Python is refused."""
EXPONENTIAL = ("exp", "sinh", "cosh")

MAX_EXPRESSION_CHARS, MAX_EXPRESSION_DEPTH = 4_000, 50
MAX_BITS = 20_000
"""Of a number in an evaluated answer, as bounded before it is computed."""
MAX_EXPONENT_BITS = 14

NOT_PARSED = "?"
"""Stands for an answer that a scorer could only evaluate: no parser takes it, so it has the score of such answers."""

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
    """The task's own score of the answer: 1 from ``solved_at`` on, else 0; the score itself with ``partial``.

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
    task = _task(name)
    score = _scored(name, task, given, dict(meta["entry"]))
    if score is None:
        return Reward(value=0.0, status="refused")
    return Reward(value=score if partial else float(score >= solved_at), parts={"score": score})


def _scored(name: str, task: Any, given: str, entry: dict[str, Any]) -> float | None:
    """The task's score of the answer; None for code in an answer to a task whose scorer evaluates."""
    if name in LISTS:
        if not is_plain(given):
            return None
        # The scorer's own eval: a global of its module, which Python finds before the built-in function.
        vars(sys.modules[type(task).__module__])["eval"] = literal
        return _score(task, given, entry)
    if name in OWN_TEXT or not (name in EXPRESSIONS or evaluates(type(task))):
        return _score(task, given, entry)
    # The entry's own answer is the data's text, and may hold more than a model's may (an unsolved Integral).
    if given == str(entry.get("answer")).strip() or is_expression(given):
        return in_child(lambda: _score(task, given, entry))
    return _score(task, NOT_PARSED, entry) if is_plain(given) else None


def _answer_part(completion: str, part: str) -> str:
    text = completion.strip()
    if part == "answer_tag":
        return answer_tag(text)
    if part == "whole" or not text:
        return text
    lines = text.split("\n")
    return lines[0 if part == "first_line" else -1].strip()


def _score(task: Any, given: str, entry: dict[str, Any]) -> float:
    """The task's score; a scorer that fails on the answer's text has not accepted it.

    Its failure is told from that of an entry that it cannot score at all by the entry's own answer.
    """
    try:
        return float(task.score_answer(given, entry))
    except (MemoryError, RecursionError):
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
    """One dataset object of the task, for its scorer (what the scorer needs to know lies in the entry)."""
    with contextlib.redirect_stdout(sys.stderr):
        from reasoning_gym.factory import DATASETS as TASKS
    if name not in TASKS:
        raise bad_value("meta.task", name, sorted(TASKS))
    build, settings_type = TASKS[name]
    return build(config=settings_type(seed=0, size=1))


@lru_cache(maxsize=256)
def evaluates(task: type) -> bool:
    """Whether the task's scorer, or what it calls in its package, refers to an evaluating function or to sympy.

    Judged by the names in its byte code, so that ``re.compile`` or a method called ``eval`` is no reason.
    """
    package = task.__module__.split(".")[0]
    waiting: list[Any] = [task.score_answer]  # type: ignore[attr-defined]
    reached = set()
    while waiting:
        function = waiting.pop()
        if function in reached:
            continue
        reached.add(function)
        for operation, name in _names(function.__code__):
            target = function.__globals__.get(name, getattr(builtins, name, None))
            if operation in ("LOAD_ATTR", "LOAD_METHOD"):
                target = getattr(task, name, None)
            module = target.__name__ if inspect.ismodule(target) else str(getattr(target, "__module__", None))
            if target in (eval, exec, compile, __import__) or module.split(".")[0] == "sympy":
                return True
            if module.split(".")[0] == package:
                methods = vars(target).values() if inspect.isclass(target) else [target]
                waiting += [each for each in map(_plain_function, methods) if each is not None]
    return False


def _plain_function(member: Any) -> Any:
    """The Python function of a function or of a static or class method; None for anything else."""
    member = getattr(member, "__func__", member)
    member = inspect.unwrap(member) if callable(member) else member
    return member if inspect.isfunction(member) else None


def _names(code: Any) -> Iterator[tuple[str, str]]:
    """The instructions that load a global name or an attribute, with the name, also of functions defined inside."""
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
    allowed = (ast.Expression, ast.List, ast.Tuple, ast.Constant, ast.UnaryOp, ast.USub, ast.UAdd, ast.Load)
    if not all(isinstance(node, allowed) for node in ast.walk(tree)):
        raise ValueError("an answer that is no list of numbers or texts")
    return ast.literal_eval(tree)


def _tree(text: str) -> ast.Expression | None:
    """The syntax tree of ``text`` as a Python expression, ``^`` being a power as in sympy; None where it is none."""
    if nesting_depth(text) > MAX_EXPRESSION_DEPTH:
        return None
    try:
        return ast.parse(text.strip().replace("^", "**"), mode="eval")
    except _PARSE_ERRORS:
        return None


def is_plain(text: str) -> bool:
    """Whether ``text`` holds no code, taken for Python: only numbers, words, lists of them, arithmetic, functions.

    This decides whether an answer that is not evaluated anyway is called ``refused`` or wrong.

    >>> [is_plain(text) for text in ("2*x + sin(x)", "Q _ _", "open('x')", "x.__class__", "(x := 1)")]
    [True, True, False, False, False]
    """
    if re.search(r"__|[#\\`@;]|\blambda\b|\.\s*[^\W\d]", text) or not text.isascii():
        return False
    for opening in re.finditer(r"\(", text):
        before = text[: opening.start()].rstrip()
        name = re.search(r"[A-Za-z_]\w*$", before)
        called = name is not None and name.group() in CALLABLE
        if before and not called and before[-1] not in "+-*/^%(,[":
            return False
    tree = _tree(text)
    return tree is None or all(_is_harmless(node) for node in ast.walk(tree))


def _is_harmless(node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        return _is_named_call(node)
    if isinstance(node, ast.BinOp):  # of texts or lists it could be of any size
        sides = (node.left, node.right)
        return not any(isinstance(side, ast.List | ast.Tuple) or _is_text(side) for side in sides)
    return isinstance(node, _HARMLESS)


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str | bytes)


def _is_named_call(node: ast.Call) -> bool:
    return isinstance(node.func, ast.Name) and node.func.id in CALLABLE and not node.keywords


def is_expression(text: str) -> bool:
    """Whether ``text`` is arithmetic over numbers, symbols and :data:`CALLABLE` that sympy may evaluate.

    An allow-list: of characters (no quotes, brackets, colons, or signs that sympy's parser rewrites, such as ``!``), of
    nodes of Python's syntax, of names (no function but as a callee, none of Python's or sympy's), and of sizes.

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
        if isinstance(node, ast.Name):
            allowed = id(node) in callees or _is_symbol(node.id)
        elif isinstance(node, ast.Call):
            allowed = _is_named_call(node)
        elif isinstance(node, ast.Constant):
            allowed = _is_finite_number(node.value)
        elif isinstance(node, ast.operator):
            allowed = isinstance(node, _OPERATORS)
        elif isinstance(node, ast.unaryop):
            allowed = isinstance(node, ast.UAdd | ast.USub)
        else:
            allowed = isinstance(node, _ARITHMETIC)
        if not allowed:
            return False
    try:
        return _bits(tree.body) <= MAX_BITS
    except (_TooLarge, RecursionError):
        return False


def _is_finite_number(value: object) -> bool:
    """Whether a literal is a whole number of any size, or a float that is finite (``1e999`` is not)."""
    if isinstance(value, bool):
        return False
    return isinstance(value, int) or (isinstance(value, float) and math.isfinite(value))


def _is_symbol(name: str) -> bool:
    """Whether sympy takes ``name`` for a symbol or a constant."""
    return name in CONSTANTS or (name not in _taken_names() and "__" not in name)


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
        value = abs(node.value)  # type: ignore[arg-type]
        bits = float(value.bit_length()) if isinstance(value, int) else abs(math.log2(value or 1.0)) + 1
    elif isinstance(node, ast.UnaryOp):
        bits = _bits(node.operand)
    elif isinstance(node, ast.BinOp):
        bits = _bits_of_operation(node)
    elif isinstance(node, ast.Call):
        bits = _bits_of_call(node)
    else:
        bits = 2.0  # a symbol, pi or E
    if bits > MAX_BITS:
        raise _TooLarge
    return bits


def _bits_of_operation(node: ast.BinOp) -> float:
    left, right = _bits(node.left), _bits(node.right)
    if not isinstance(node.op, ast.Pow):
        return left + right + 1  # sums, products, and fractions of them
    if right > MAX_EXPONENT_BITS:
        raise _TooLarge
    return float(max(left, 1.0) * 2.0**right)


def _bits_of_call(node: ast.Call) -> float:
    assert isinstance(node.func, ast.Name)
    bits = max(map(_bits, node.args), default=0.0)
    if node.func.id in EXPONENTIAL:
        if bits > MAX_EXPONENT_BITS:
            raise _TooLarge
        return float(2.0 * 2.0**bits)
    if node.func.id == "factorial":  # of n has at most n log2(n) bits
        if bits > MAX_EXPONENT_BITS:
            raise _TooLarge
        return float(2.0**bits * max(bits, 1.0))
    return bits + 64.0
