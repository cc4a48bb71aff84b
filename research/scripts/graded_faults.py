"""Faults of math-verify that graded answers show, and choices of ours that explain a verdict."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Probe:
    """A gold and an answer as math-verify gets them, and whether they are equal."""

    gold: str
    answer: str
    expected: bool


@dataclass(frozen=True, kw_only=True)
class Fault:
    """An issue for math-verify's authors, and what kl_comedy does in front of it."""

    title: str
    text: str
    mended: str
    probes: tuple[Probe, ...]


def right(gold: str, answer: str) -> Probe:
    """A right answer."""
    return Probe(gold=gold, answer=answer, expected=True)


def wrong(gold: str, answer: str) -> Probe:
    """A wrong answer."""
    return Probe(gold=gold, answer=answer, expected=False)


DOCUMENTED = {
    "units": "units are not compared",
    "unsolved": "an inequality that is still to be solved is not an answer",
    "grouping": "a comma or a point separates thousands only where no other reading is left",
    "binomial": "`\\binom` is a binomial coefficient",
    "rounding": "decimals are compared after rounding to `float_rounding` places",
}
"""Choices of kl_comedy that explain a verdict, by the word that a row names in ``documented``."""

FAULTS = (
    Fault(
        title="Recurring decimals are not numbers",
        text="A decimal with a bar (`\\overline`, `\\bar`), with dots or with its period in brackets is not read as "
        "the fraction that it is, so that an exact answer gets no reward. Wrong answers get one: `0.\\overline{3}` is "
        "parsed to 0, and `0.0\\overline{3}` to a product.",
        mended="a recurring decimal becomes its fraction (`recurring_fractions`).",
        probes=(
            right(r"$\frac{1}{3}$", r"$0.\overline{3}$"),
            right(r"$0.1\overline{6}$", r"$\frac{1}{6}$"),
            right(r"$\frac{1}{3}$", r"$0.\dot{3}$"),
            right(r"$\frac{1}{3}$", r"$0.(3)$"),
            right(r"$\frac{1}{3}$", r"$0.333\ldots$"),
            wrong(r"$0.\overline{3}$", r"$0.0\overline{3}$"),
            wrong("$0$", r"$0.\overline{3}$"),
        ),
    ),
    Fault(
        title="Percent signs behind a fraction, a thin space or as text",
        text="`\\frac{25}{2}\\%` is not parsed in dollar signs. In a box `12\\frac{1}{2}\\%` loses its 12. The sign of "
        "`37.5\\,\\%` is lost. `\\text{ percent}` with a space is dropped like a unit, so that 0.5 percent is 0.5.",
        mended="the sign is moved to its number, and a fraction of percent becomes a fraction of one "
        "(`_fractions_of_percent`).",
        probes=(
            right(r"$12.5\%$", r"\boxed{12\frac{1}{2}\%}"),
            right(r"$\frac{1}{8}$", r"$\frac{25}{2}\%$"),
            right(r"$37.5\%$", r"$37.5\,\%$"),
            wrong(r"$0.5$", r"$0.5\text{ percent}$"),
        ),
    ),
    Fault(
        title="Everything behind the first unit is dropped",
        text="A second quantity or a further term is cut off with the unit before it, so that a wrong answer is "
        "rewarded.",
        mended="two quantities become a pair, and a sum of one unit loses its units (`_quantities`).",
        probes=(
            wrong("$3$", r"$3\text{ hours }20\text{ minutes}$"),
            wrong(r"$3\text{ hours }45\text{ minutes}$", r"$3\text{ hours }20\text{ minutes}$"),
            wrong("$100$", r"$10^2\text{ km} + 1\text{ km}$"),
        ),
    ),
    Fault(
        title="A unit that is a fraction is not dropped",
        text="`\\frac{\\text{km}}{\\text{h}}` behind a number makes a box unreadable.",
        mended="the fraction of two units is removed.",
        probes=(right("$60$", r"\boxed{60 \frac{\text{km}}{\text{h}}}"),),
    ),
    Fault(
        title="A set with a condition is the first number of its condition",
        text="`\\{x\\mid 2\\le x\\le5\\}` is parsed to 2: a wrong answer is rewarded, and the right one is not.",
        mended="a set with a condition becomes the condition.",
        probes=(
            wrong("$2$", r"$\{x\mid 2\le x\le5\}$"),
            right("$[2,5]$", r"$\{x\mid 2\le x\le5\}$"),
        ),
    ),
    Fault(
        title="Two inequalities are not the union of two rays",
        text="`x<-2\\text{ or }x>2` is a set of two relations, which equals no union of intervals.",
        mended="where the gold is a union, bounds of one variable are their union (`_as_sets`).",
        probes=(right(r"$(-\infty,-2)\cup(2,\infty)$", r"$x<-2\text{ or }x>2$"),),
    ),
    Fault(
        title="A point equals a set, and assignments in the wrong order",
        text="A finite set is compared with a point in the order in which it was written. A set has no order, so that "
        "`\\{1,2\\}` is no point, and `y=1, x=2` is the point (2, 1).",
        mended="a set in braces is no point (`_equal`), and assignments are sorted by name (`_sorted_assignments`).",
        probes=(
            wrong("$(1,2)$", r"$\{1,2\}$"),
            wrong("$(1,2)$", "$y=1, x=2$"),
            right("$(2,1)$", "$y=1, x=2$"),
        ),
    ),
    Fault(
        title="The name of a point makes it a function",
        text="`P(1,2)` is a function of two arguments.",
        mended="a capital letter before coordinates, at the start of a formula, is removed.",
        probes=(right("$(1,2)$", "$P(1,2)$"),),
    ),
    Fault(
        title="Of a point in prose the last coordinate is read",
        text="Without dollar signs `(2, -1)` is the number -1.",
        mended="a point at the end of a text without formulas becomes a formula.",
        probes=(
            right("$(2,-1)$", "The lines meet at the point (2, -1)."),
            wrong("$-1$", "The lines meet at the point (2, -1)."),
        ),
    ),
    Fault(
        title="A comma before `and` is a second comma",
        text="`1,\\ 2,\\ \\text{and }3` becomes `1, 2, ,3` and is parsed to 2. The pattern takes a comma directly "
        "before `\\text`, and not one with a control space between.",
        mended="the comma and the word become one comma.",
        probes=(right("$1,2,3$", r"$1,\ 2,\ \text{and }3$"),),
    ),
    Fault(
        title="`\\varnothing` is a variable",
        text="`\\emptyset` is the empty set and `\\varnothing` a symbol.",
        mended="`\\varnothing` becomes `\\emptyset`.",
        probes=(right(r"$\emptyset$", r"$\varnothing$"),),
    ),
    Fault(
        title="The distance after a line break is a factor of the next entry",
        text="In a matrix `\\\\[2pt]30` is parsed to the product of 2, p, t and 30.",
        mended="the distance is removed.",
        probes=(
            right(
                r"$\begin{pmatrix}10&20\\30&40\end{pmatrix}$",
                r"$\begin{pmatrix}10&20\\[2pt]30&40\end{pmatrix}$",
            ),
        ),
    ),
    Fault(
        title="Mixed numbers in prose and with a slash are products",
        text="`2 2/3` is 4/3 in a box and 2 in prose: wrong answers are rewarded (see also the "
        "project's pull request 81).",
        mended="a number, a space and a fraction are a sum (`improper_fractions`).",
        probes=(
            wrong(r"$\frac{4}{3}$", r"\boxed{2 2/3}"),
            right(r"$\frac{8}{3}$", r"\boxed{2 2/3}"),
            wrong("$2$", "The total is 2 2/3."),
        ),
    ),
    Fault(
        title="The base of a number is not compared",
        text="`52_9` and `52_8` are equal.",
        mended="digits and base must both agree (`numerals`, `digits_and_base`).",
        probes=(wrong("$52_8$", "$52_9$"),),
    ),
    Fault(
        title="Very small numbers are all equal",
        text="A difference below 10^-15 is zero, also where both numbers are smaller than that.",
        mended="the precision follows the size of the numbers (`_needed_precision`).",
        probes=(wrong(r"$\frac{1}{2^{98}}$", r"$-\frac{1}{2^{98}}$"),),
    ),
)
