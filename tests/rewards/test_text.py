"""The string rewards: extraction rules, formats, options, and that hostile text stays cheap in process."""

from __future__ import annotations

import time
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kl_comedy.errors import UserError
from kl_comedy.rewards import score
from kl_comedy.rewards.text import answer_tag, chosen_letter, clean, final_segment, nesting_depth, number, tail


def verdict(name: str, completion: str, answer: str, **options: object) -> tuple[float, str]:
    (reward,) = score(name, completions=[completion], answers=[answer], **options)
    return reward.value, reward.status


def test_exact_answer_reads_the_final_number_or_text() -> None:
    right = [(text, "7") for text in ("7", " 7 apples", "2 + 5 = 7\n", "A: 8\n#### 7", "USA: 50 of 7", "A:\n7", "7.0")]
    right += [("#### 1,234", "1234"), ("#### $1,234.50", "1234.5"), ("A: -3", "-3"), ("x = 6/8", "3/4")]
    right += [("x = 0.75", "3/4"), ("The sum 2 + 3 is 5.", "5"), ("A: (Paris)", "paris")]
    wrong = [("2 + 5 = 7\nA: 8", "7"), ("A: -3", "3"), ("7\n20+1=21", "7"), ("77", "7"), ("A: London", "paris")]
    unparseable = ["3+4", "A: 3 + 4", "", "A:", "seven", "1/0"]
    for completion, answer in right:
        assert verdict("exact_answer", completion, answer) == (1.0, "ok"), completion
    for completion, answer in wrong:
        assert verdict("exact_answer", completion, answer) == (0.0, "ok"), completion
    for completion in unparseable:
        assert {verdict("exact_answer", completion, gold) for gold in ("7", "3", "4")} == {(0.0, "unparseable")}
    assert verdict("exact_answer", "So => 9 (= 3 * 3)", "9", markers=["=>"]) == (1.0, "ok")
    assert verdict("exact_answer", "anything", "?!") == (0.0, "refused"), "a gold with nothing to compare"


def test_the_last_answer_tag_counts_and_must_be_closed() -> None:
    assert answer_tag("<answer>1</answer> no, <answer> 2 </answer> is it") == "2"
    for text in ("<answer>1", "1</answer>", "<answer>1</answer> no, <answer>2"):
        assert answer_tag(text) == ""


@given(st.integers(-(10**12), 10**12))
def test_every_integer_is_read_back_with_and_without_commas(value: int) -> None:
    assert number(str(value)) == number(f"{value:,}") == number(f" {value}. ".strip(" .")) == Fraction(value)
    assert final_segment(f"9 = 9\n#### {value}") == (str(value), True)
    assert verdict("exact_answer", f"first 1\nA: {value:,}.", str(value)) == (1.0, "ok")
    assert verdict("exact_answer", f"A: {value + 1}", str(value)) == (0.0, "ok")


def test_the_chosen_letter() -> None:
    texts = {
        "A": ["Answer: A"],
        "B": [
            "B",
            "B.",
            "The correct answer is option B because A is wrong",
            "\\boxed{B} though the answer is C",
            "B) 12",
        ],
        "C": ["The answer is (C).", "\\boxed{\\text{(C)}}", "It must be C, not A. So C"],
        "D": ["the answer is: **D**", "Not (A) but (D)."],
        None: [
            "(c) is not capital",
            "\\boxed{\\mathrm{X}}",
            "A train leaves at noon.",
            "I think about A bird",
            "",
            "DNA",
        ],
    }
    texts[None] += ["The answer is obvious", "answer is a matter of taste"]
    for letter, group in texts.items():
        assert [chosen_letter(text, "ABCD") for text in group] == [letter] * len(group)


def test_letters_follow_the_choices_of_the_problem() -> None:
    metas = [{"choices": ["x", "y"]}]
    (reward,) = score("multiple_choice", completions=["(B) or (D)"], answers=["B"], metas=metas)
    assert reward.value == 1.0
    with pytest.raises(UserError, match="letter of the right choice"):
        score("multiple_choice", completions=["B"], answers=["D"], metas=metas)
    with pytest.raises(UserError, match="distinct capital letters"):
        score("multiple_choice", completions=["B"], answers=["B"], letters="ab")


def test_format_styles() -> None:
    for style, good, bad in (
        ("boxed", "is \\boxed{4}", "is \\boxed{} or 4"),
        ("gsm8k", "so\n#### 4\n", "#### 4\nand more"),
        ("answer_line", "so\nA: 4", "DATA: 4"),
        ("answer_tag", "so <answer>4</answer>", "<answer>4</answer> <answer>5</answer>"),
        (
            "think_answer",
            "<think>a\nb</think>\n<answer>4</answer>\n",
            "<think>a</think><think></think><answer>4</answer>",
        ),
        ("number", " -1,234.5\n", "4 apples"),
    ):
        rewards = score("format", completions=[good, bad, ""], answers=[""] * 3, style=style)
        assert [reward.value for reward in rewards] == [1.0, 0.0, 0.0], style
    assert verdict("format", "a" * 11, "", max_chars=10) == (0.0, "refused")


def test_length_is_a_clipped_ramp() -> None:
    values = [verdict("length", "x" * n, "", free=10, full=20)[0] for n in (0, 10, 15, 20, 99)]
    assert values == [0.0, 0.0, 0.5, 1.0, 1.0]


REPEATED = [
    " ",
    "answer is ",
    "(",
    "(\n",
    "1",
    "1 ",
    "1+",
    "1-(",
    ")-",
    "\\boxed{",
    "1,111",
    "*_`\"'([",
    "= ",
    "A:",
    "A",
    "A ",
]
REPEATED += ["½", "2½", "√", "1\\,", "1e5 ", "1*10^", "2 2/3", "\\frac{1}{2}", "option: "]
ATTACKS = [(part * 16_000)[:16_000] for part in [*REPEATED, "1.1", "\n"]]
ATTACKS += ["answer" + " " * 16_000, "1 " + "-" * 16_000, "1" + ")" * 16_000, "x" * 5_000_000]


@pytest.mark.parametrize(("name", "answer"), [("exact_answer", "7"), ("exact_answer", "x"), ("multiple_choice", "A")])
def test_in_process_rewards_are_cheap_on_attacks(name: str, answer: str) -> None:
    for attack in ATTACKS:
        started = time.process_time()
        score(name, completions=[attack], answers=[answer])
        assert time.process_time() - started < 5, attack[:10]  # milliseconds; minutes where a pattern backtracks


@given(st.text(alphabet="ab\n", max_size=300), st.integers(1, 100))
def test_tail_is_a_suffix_within_the_cap(text: str, cap: int) -> None:
    end = tail(text, cap)
    assert text.endswith(end) and len(end) <= cap
    assert end == text if len(text) <= cap else len(end) > 0


@given(st.text())
def test_clean_text_can_be_encoded_and_has_no_controls(text: str) -> None:
    cleaned = clean(text + "\ud800\x00\x1b")
    cleaned.encode("utf-8")
    assert not any(ord(char) < 32 and char not in "\n\t" for char in cleaned)


@given(st.integers(0, 40), st.sampled_from(["{}", "()", "[]"]))
def test_depth_counts_nesting_from_either_side(levels: int, pair: str) -> None:
    nested = pair[0] * levels + "x" + pair[1] * levels
    assert nesting_depth(nested) == nesting_depth(nested[levels:]) == levels
    assert nesting_depth((pair + " ") * 50) == 1
