"""Which sampling is allowed where, and what ends a completion."""

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from kl_comedy.config.schema import RolloutConfig
from kl_comedy.errors import UserError
from kl_comedy.records import STOP_REASONS
from kl_comedy.registry import ROLLOUTS
from kl_comedy.rollouts import Sampling, sampling_from
from kl_comedy.rollouts.decoding import Draws, StopStrings, ending, pick


def test_training_samples_from_the_whole_distribution():
    sampling = sampling_from(RolloutConfig(temperature=0.7, stop=["\n"]))
    assert (sampling.top_p, sampling.top_k, sampling.min_p) == (1.0, 0, 0.0)
    assert (sampling.temperature, sampling.stop) == (0.7, ("\n",))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("temperature", -1.0),
        ("temperature", float("nan")),
        ("max_new_tokens", 0),
        ("stop", [""]),
    ],
)
def test_values_out_of_range_name_their_key(key, value):
    with pytest.raises(UserError, match=rf"rollout\.{key}: got"):
        sampling_from(RolloutConfig(**{key: value}))


@pytest.mark.parametrize(("key", "value"), [("top_p", 0.0), ("top_p", 1.5), ("top_k", -1), ("min_p", 1.0)])
def test_a_truncation_out_of_range_names_its_key(key, value):
    with pytest.raises(UserError, match=rf"^{key}: got"):
        Sampling(temperature=1.0, max_new_tokens=1, **{key: value})


def test_a_stop_string_is_not_a_list_of_letters():
    with pytest.raises(UserError, match="stop"):
        Sampling(temperature=1, max_new_tokens=1, stop="ab")


def test_the_hf_backend_is_registered_and_names_an_unknown_option():
    assert "hf" in ROLLOUTS
    with pytest.raises(UserError, match=r"rollout\.options\.dtype: no such key"):
        ROLLOUTS.get("hf").fn(RolloutConfig(options={"dtype": "half"}), loaded=None)


@given(ids=st.lists(st.integers(0, 4), min_size=1, max_size=8), ends=st.sets(st.integers(0, 4)), stop=st.integers(0, 8))
def test_an_ending_is_the_first_of_end_token_stop_string_and_limit(ids, ends, stop):
    stop = min(stop, len(ids))
    length, reason = ending(ids, sorted(ends), stop)
    assert 1 <= length <= len(ids) and reason in STOP_REASONS
    assert not any(token in ends for token in ids[: length - 1])
    assert (ids[length - 1] in ends) is (reason == "eos") or reason == "stop"
    assert reason != "length" or (length == len(ids) and not stop)
    assert reason != "stop" or length == stop


def test_draws_record_the_log_prob_of_what_was_drawn_after_the_temperature():
    g = torch.Generator().manual_seed(0)
    scores_TBV = torch.randn(4, 3, 7, generator=g)
    sampling = Sampling(temperature=0.5, max_new_tokens=4)
    uniform_BT = torch.rand(3, 4, generator=g)
    draws = Draws(sampling=sampling, uniform_BT=uniform_BT, ends=[6], stops=StopStrings(Letters(), ()))
    for step in range(4):
        chosen_B = draws.draw(scores_TBV[step], [0, 1, 2], version=step)
        logp_BV = (scores_TBV[step] / 0.5).log_softmax(-1)
        assert chosen_B.tolist() == pick(logp_BV, uniform_BT[:, step]).tolist()
        for row, token in zip(draws.completions, chosen_B.tolist(), strict=True):
            if len(row.ids) == step + 1:
                assert row.ids[-1] == token and row.versions == list(range(step + 1))
                assert row.logps[-1] == pytest.approx(float(logp_BV[draws.completions.index(row), token]))
    assert [row.stop_reason for row in draws.completions] == [
        "eos" if 6 in r.ids else "length" for r in draws.completions
    ]
    assert all(6 not in row.ids[:-1] for row in draws.completions)


class Letters:
    """A tokenizer whose token n is the n-th piece; one piece holds several letters."""

    pieces = ("a", "b", "ab", "xaby", "é", "<e>")

    def decode(self, ids, *, skip_special_tokens, clean_up_tokenization_spaces):
        assert not skip_special_tokens and not clean_up_tokenization_spaces
        return "".join(self.pieces[n] for n in ids)


class Bytes:
    """A tokenizer whose token is a byte: a character may take four, and the first of a window be cut."""

    def decode(self, ids, *, skip_special_tokens, clean_up_tokenization_spaces):
        return bytes(ids).decode("utf-8", errors="replace")


@given(
    parts=st.lists(st.sampled_from(["a", "é", "完", "了", "🎭", "\n"]), min_size=1, max_size=8),
    stop=st.lists(st.sampled_from(["完了", "完了完了完了", "🎭", "é完", "\n\n", "了a"]), min_size=1, max_size=2),
)
@example(parts=["a", "完", "了", "a"], stop=["完了"])
@example(parts=["a", "完", "了", "完", "了", "完", "了"], stop=["完了完了完了"])
def test_a_stop_string_of_several_bytes_a_character_is_found_at_its_last_byte(parts, stop):
    ids = list("".join(parts).encode())
    stops = StopStrings(Bytes(), tuple(stop))
    found = next((n for n in range(1, len(ids) + 1) if stops.completed_by(ids[:n])), None)
    ends = [ids_before(ids, each.encode()) for each in stop]
    assert found == min((end for end in ends if end is not None), default=None)


def ids_before(ids, text):
    """How many ids there are up to the end of the first ``text``; None without it."""
    at = bytes(ids).find(text)
    return None if at < 0 else at + len(text)


@given(
    ids=st.lists(st.integers(0, 5), min_size=1, max_size=12),
    stop=st.lists(st.sampled_from(["ab", "ba", "b<e>", "aa", "xaby", "éé"]), min_size=1, max_size=2),
)
def test_a_stop_string_ends_at_the_token_that_completes_it(ids, stop):
    sampling = Sampling(temperature=0.0, max_new_tokens=len(ids), stop=tuple(stop))
    uniform_BT = torch.zeros(1, len(ids))
    draws = Draws(sampling=sampling, uniform_BT=uniform_BT, ends=[], stops=StopStrings(Letters(), stop))
    for token in ids:
        draws.draw(torch.eye(6)[token][None], [0], version=0)
    texts = ["".join(Letters.pieces[i] for i in ids[:n]) for n in range(len(ids) + 1)]
    end = next((n for n, text in enumerate(texts) if any(s in text for s in stop)), None)
    (completion,) = draws.completions
    assert completion.ids == ids[:end]
    assert completion.stop_reason == ("length" if end is None else "stop")
