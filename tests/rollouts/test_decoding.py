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
    # ``stop`` is the length at which a stop string is complete; 0 where there is none.
    stop = min(stop, len(ids))
    length, reason = ending(ids, sorted(ends), stop)
    assert length >= 1
    assert length <= len(ids)
    assert reason in STOP_REASONS
    assert not ends & set(ids[: length - 1]), "an end token before the end"
    ends_with_end_token = ids[length - 1] in ends
    if reason == "eos":
        assert ends_with_end_token
    if reason == "length":
        assert not ends_with_end_token
        assert length == len(ids)
        assert not stop
    if reason == "stop":
        assert length == stop


def test_draws_record_the_log_prob_of_what_was_drawn_after_the_temperature():
    end_token = 6
    generator = torch.Generator().manual_seed(0)
    scores_TBV = torch.randn(4, 3, 7, generator=generator)
    sampling = Sampling(temperature=0.5, max_new_tokens=4)
    uniform_BT = torch.rand(3, 4, generator=generator)
    draws = Draws(sampling=sampling, uniform_BT=uniform_BT, ends=[end_token], stops=StopStrings(Letters(), ()))
    # Rows that have ended are drawn for too, as in a batch, and keep what they have.
    for step in range(4):
        chosen_B = draws.draw(scores_TBV[step], [0, 1, 2], version=step)
        logp_BV = (scores_TBV[step] / 0.5).log_softmax(-1)
        assert chosen_B.tolist() == pick(logp_BV, uniform_BT[:, step]).tolist()
        for row, completion in enumerate(draws.completions):
            ended_earlier = len(completion.ids) < step + 1
            if ended_earlier:
                continue
            token = int(chosen_B[row])
            assert completion.ids[-1] == token
            assert completion.versions == list(range(step + 1))
            assert completion.logps[-1] == pytest.approx(float(logp_BV[row, token]))
    for completion in draws.completions:
        expected_reason = "eos" if end_token in completion.ids else "length"
        assert completion.stop_reason == expected_reason
        assert end_token not in completion.ids[:-1]


class Letters:
    """A tokenizer whose token n is the n-th piece; one piece holds several letters."""

    pieces = ("a", "b", "ab", "xaby", "é", "<e>")

    def decode(self, ids, *, skip_special_tokens, clean_up_tokenization_spaces):
        assert not skip_special_tokens
        assert not clean_up_tokenization_spaces
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
    text = "".join(parts).encode()
    ids = list(text)
    stops = StopStrings(Bytes(), tuple(stop))
    lengths_that_end = [n for n in range(1, len(ids) + 1) if stops.completed_by(ids[:n])]
    expected_lengths = []
    for stop_string in stop:
        position = text.find(stop_string.encode())
        if position >= 0:
            expected_lengths.append(position + len(stop_string.encode()))
    assert min(lengths_that_end, default=None) == min(expected_lengths, default=None)


@given(
    ids=st.lists(st.integers(0, 5), min_size=1, max_size=12),
    stop=st.lists(st.sampled_from(["ab", "ba", "b<e>", "aa", "xaby", "éé"]), min_size=1, max_size=2),
)
def test_a_stop_string_ends_at_the_token_that_completes_it(ids, stop):
    sampling = Sampling(temperature=0.0, max_new_tokens=len(ids), stop=tuple(stop))
    uniform_BT = torch.zeros(1, len(ids))
    draws = Draws(sampling=sampling, uniform_BT=uniform_BT, ends=[], stops=StopStrings(Letters(), stop))
    for token in ids:
        # Greedy, so that scores of 1 for a token and 0 for the others draw it.
        draws.draw(torch.eye(6)[token][None], [0], version=0)
    expected_ids = ids
    expected_reason = "length"
    text = ""
    for count, token in enumerate(ids, start=1):
        text += Letters.pieces[token]
        if any(stop_string in text for stop_string in stop):
            expected_ids = ids[:count]
            expected_reason = "stop"
            break
    (completion,) = draws.completions
    assert completion.ids == expected_ids
    assert completion.stop_reason == expected_reason
