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


# --- exact_answer -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("7", "7"),
        (" 7 apples", "7"),
        ("2 + 5 = 7\n", "7"),
        ("A: 8\n#### 7", "7"),
        ("USA: 50 of 7", "7"),
        ("#### 7 eggs of 20", "7"),
        ("7 eggs\nA: 7 of 20", "7"),
        ("A:\n7", "7"),
        ("7.0", "7"),
        ("#### 1,234", "1234"),
        ("#### $1,234.50", "1234.5"),
        ("A: -3", "-3"),
        ("x = 6/8", "3/4"),
        ("x = 0.75", "3/4"),
        ("The sum 2 + 3 is 5.", "5"),
        ("A: (Paris)", "paris"),
    ],
)
def test_exact_answer_reads_the_final_number_or_text(completion: str, answer: str) -> None:
    assert verdict("exact_answer", completion, answer) == (1.0, "ok")


@pytest.mark.parametrize(
    ("completion", "answer"),
    [("2 + 5 = 7\nA: 8", "7"), ("A: -3", "3"), ("7\n20+1=21", "7"), ("77", "7"), ("A: London", "paris")],
)
def test_exact_answer_reads_nothing_but_the_final_number_or_text(completion: str, answer: str) -> None:
    assert verdict("exact_answer", completion, answer) == (0.0, "ok")


@pytest.mark.parametrize("answer", ["7", "3", "4"])
@pytest.mark.parametrize("completion", ["3+4", "A: 3 + 4", "", "A:", "seven", "1/0"])
def test_exact_answer_cannot_read_a_calculation_or_nothing(completion: str, answer: str) -> None:
    assert verdict("exact_answer", completion, answer) == (0.0, "unparseable")


def test_exact_answer_reads_after_other_markers() -> None:
    assert verdict("exact_answer", "So => 9 (= 3 * 3)", "9", markers=["=>"]) == (1.0, "ok")


def test_exact_answer_refuses_a_gold_with_nothing_to_compare() -> None:
    assert verdict("exact_answer", "anything", "?!") == (0.0, "refused")


@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=30), st.sampled_from(["+", ";", "=", " ", ", ", " of "]))
def test_any_number_pays_a_list_for_each_of_its_numbers_and_for_no_other(values: list[int], separator: str) -> None:
    completion = separator.join(map(str, values))
    for value in values:
        assert verdict("any_number", completion, str(value)) == (1.0, "ok")
        assert verdict("any_number", completion, str(-value)) == (1.0, "ok"), "signs do not count"
    absent = max(values) + 1
    assert verdict("any_number", completion, str(absent)) == (0.0, "ok")


@pytest.mark.parametrize(
    ("completion", "answer", "expected"),
    [
        ("1,234 apples", "1234", (1.0, "ok")),
        ("2.50", "5/2", (1.0, "ok")),
        ("no digit", "7", (0.0, "unparseable")),
        ("7", "Paris", (0.0, "refused")),
        ("9" * 1_000_000, "7", (0.0, "ok")),
    ],
)
def test_any_number_reads_numbers_of_any_form(completion: str, answer: str, expected: tuple[float, str]) -> None:
    assert verdict("any_number", completion, answer) == expected


def test_the_last_answer_tag_counts_and_must_be_closed() -> None:
    assert answer_tag("<answer>1</answer> no, <answer> 2 </answer> is it") == "2"


@pytest.mark.parametrize("text", ["<answer>1", "1</answer>", "<answer>1</answer> no, <answer>2"])
def test_an_answer_tag_that_is_not_closed_has_no_answer(text: str) -> None:
    assert answer_tag(text) == ""


@given(st.integers(-(10**12), 10**12))
def test_every_integer_is_read_back_with_and_without_commas(value: int) -> None:
    assert number(str(value)) == Fraction(value)
    assert number(f"{value:,}") == Fraction(value)
    assert number(f" {value}. ".strip(" .")) == Fraction(value)


@given(st.integers(-(10**12), 10**12))
def test_every_integer_is_read_after_its_marker(value: int) -> None:
    assert final_segment(f"9 = 9\n#### {value}") == (str(value), True)


@given(st.integers(-(10**12), 10**12))
def test_every_integer_is_right_and_its_neighbour_wrong(value: int) -> None:
    assert verdict("exact_answer", f"first 1\nA: {value:,}.", str(value)) == (1.0, "ok")
    assert verdict("exact_answer", f"A: {value + 1}", str(value)) == (0.0, "ok")


# --- multiple_choice ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("Answer: A", "A"),
        ("B", "B"),
        ("B.", "B"),
        ("The correct answer is option B because A is wrong", "B"),
        ("\\boxed{B} though the answer is C", "B"),
        ("B) 12", "B"),
        ("The answer is (C).", "C"),
        ("\\boxed{\\text{(C)}}", "C"),
        ("It must be C, not A. So C", "C"),
        ("the answer is: **D**", "D"),
        ("Not (A) but (D).", "D"),
        ("(c) is not capital", None),
        ("\\boxed{\\mathrm{X}}", None),
        ("A train leaves at noon.", None),
        ("I think about A bird", None),
        ("", None),
        ("DNA", None),
        ("The answer is obvious", None),
        ("answer is a matter of taste", None),
    ],
)
def test_the_chosen_letter(text: str, letter: str | None) -> None:
    assert chosen_letter(text, "ABCD") == letter


TWO_CHOICES = [{"choices": ["x", "y"]}]


def test_letters_follow_the_choices_of_the_problem() -> None:
    (reward,) = score("multiple_choice", completions=["(B) or (D)"], answers=["B"], metas=TWO_CHOICES)
    assert reward.value == 1.0, "there is no D"


def test_a_gold_that_is_no_letter_of_the_choices_is_refused() -> None:
    with pytest.raises(UserError, match="letter of the right choice"):
        score("multiple_choice", completions=["B"], answers=["D"], metas=TWO_CHOICES)


def test_letters_that_are_no_capitals_are_refused() -> None:
    with pytest.raises(UserError, match="distinct capital letters"):
        score("multiple_choice", completions=["B"], answers=["B"], letters="ab")


# --- format and length --------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("style", "good", "bad"),
    [
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
    ],
)
def test_format_styles(style: str, good: str, bad: str) -> None:
    rewards = score("format", completions=[good, bad, ""], answers=[""] * 3, style=style)
    assert [reward.value for reward in rewards] == [1.0, 0.0, 0.0]


def test_format_refuses_a_text_over_its_limit() -> None:
    assert verdict("format", "a" * 11, "", max_chars=10) == (0.0, "refused")


@pytest.mark.parametrize(("characters", "value"), [(0, 0.0), (10, 0.0), (15, 0.5), (20, 1.0), (99, 1.0)])
def test_length_is_a_clipped_ramp(characters: int, value: float) -> None:
    assert verdict("length", "x" * characters, "", free=10, full=20)[0] == value


def plain_overlong_punishment(length: int, most: int, cache: int) -> float:
    """2503.14476 Eq. 13, case by case."""
    if length <= most - cache:
        return 0.0
    if length <= most:
        return ((most - cache) - length) / cache
    return -1.0


def test_length_in_tokens_is_the_soft_overlong_punishment() -> None:
    tokens = [0, 1, 11, 12, 13, 15, 16, 17, 40]
    rewards = score(
        "length",
        completions=["abc"] * len(tokens),
        answers=[""] * len(tokens),
        metas=[{"drawn_tokens": number} for number in tokens],
        unit="tokens",
        free=12,
        full=16,
    )
    assert [-reward.value for reward in rewards] == [plain_overlong_punishment(number, 16, 4) for number in tokens]


def test_length_in_tokens_of_a_bare_text_is_refused() -> None:
    with pytest.raises(UserError, match=r"^length: unit=tokens .* meta drawn_tokens$"):
        verdict("length", "abc", "", unit="tokens")


# --- hostile text -------------------------------------------------------------------------------------------------
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
    r"\boxed{",
    "1,111",
    "*_`\"'([",
    "= ",
    "A:",
    "A",
    "A ",
    "½",
    "2½",
    "√",
    r"1\,",
    "1e5 ",
    "1*10^",
    "2 2/3",
    r"\frac{1}{2}",
    "option: ",
    "1.1",
    "\n",
]
LENGTH = 16_000
ATTACKS = [(part * LENGTH)[:LENGTH] for part in REPEATED]
ATTACKS.append("answer" + " " * LENGTH)
ATTACKS.append("1 " + "-" * LENGTH)
ATTACKS.append("1" + ")" * LENGTH)
ATTACKS.append("x" * 5_000_000)


@pytest.mark.parametrize(("name", "answer"), [("exact_answer", "7"), ("exact_answer", "x"), ("multiple_choice", "A")])
def test_in_process_rewards_are_cheap_on_attacks(name: str, answer: str) -> None:
    for attack in ATTACKS:
        started = time.process_time()
        score(name, completions=[attack], answers=[answer])
        # It takes milliseconds, and minutes where a pattern backtracks.
        assert time.process_time() - started < 5, attack[:10]


# --- helpers ------------------------------------------------------------------------------------------------------
@given(st.text(alphabet="ab\n", max_size=300), st.integers(1, 100))
def test_tail_is_a_suffix_within_the_cap(text: str, cap: int) -> None:
    end = tail(text, cap)
    assert text.endswith(end)
    assert len(end) <= cap
    if len(text) <= cap:
        assert end == text
    else:
        assert len(end) > 0


@given(st.text())
def test_clean_text_can_be_encoded_and_has_no_controls(text: str) -> None:
    cleaned = clean(text + "\ud800\x00\x1b")
    cleaned.encode("utf-8")
    for character in cleaned:
        assert ord(character) >= 32 or character in "\n\t"


brackets = st.sampled_from(["{}", "()", "[]"])


@given(st.integers(0, 40), brackets)
def test_depth_counts_nesting_from_either_side(levels: int, pair: str) -> None:
    opening, closing = pair
    assert nesting_depth(opening * levels + "x" + closing * levels) == levels
    assert nesting_depth("x" + closing * levels) == levels


@given(brackets)
def test_brackets_side_by_side_are_one_deep(pair: str) -> None:
    assert nesting_depth((pair + " ") * 50) == 1
