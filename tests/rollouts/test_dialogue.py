"""The loop of dialogues, above a scripted sampler and above the hf backend.

What a dialogue must be is computed here from the script: ids, masks and log-probs are listed token by token.
"""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from kl_comedy.config.schema import EnvironmentConfig, RolloutConfig
from kl_comedy.errors import RunFailed, UserError
from kl_comedy.models import LoadedModel
from kl_comedy.models.pocket import EOS, VOCABULARY, build_model, build_tokenizer, recipe_from_options
from kl_comedy.records import FOREIGN_VERSION, Problem, Prompt, Rollout, Step
from kl_comedy.rewards.pool import Failure
from kl_comedy.rollouts import Sampling, build_hf
from kl_comedy.rollouts.dialogue import Dialogue, ObservationText

END = VOCABULARY.index(EOS)
FAILED = Failure("ValueError: of the tool")


def ids_of(text):
    """Ids of characters; ``$`` is the end token."""
    return tuple(END if character == "$" else VOCABULARY.index(character) for character in text)


def loaded():
    recipe = dataclasses.replace(recipe_from_options({"preset": "tiny"}), seed=3)
    model = build_model(recipe).eval()
    with torch.no_grad():
        model.lm_head.weight *= 20  # so that log-probs differ between tokens
    return LoadedModel(model=model, tokenizer=build_tokenizer(), device=torch.device("cpu"), source="test")


LOADED = loaded()


def prompts(*texts):
    return [
        Prompt(problem=Problem(id=text, text=text, answer="7"), text=text, token_ids=ids_of(text)) for text in texts
    ]


class ScriptedSampler:
    """Draws the turns of ``script``, by the ids that a turn follows; token n of turn t has log-prob -(t + n / 100)."""

    version = 4

    def __init__(self, script):
        self._script = {ids_of(before): turn for before, turn in script.items()}
        self.calls = []

    def generate(self, prompts, *, group_size, sampling, seed):
        self.calls.append(SimpleNamespace(prompts=len(prompts), group_size=group_size, sampling=sampling, seed=seed))
        turn_number = len(self.calls)
        rollouts = []
        for group, prompt in enumerate(prompts):
            for _ in range(group_size):
                ids = ids_of(self._script[prompt.token_ids])[: sampling.max_new_tokens]
                text = "".join(VOCABULARY[token] for token in ids if token != END)
                reason = "eos" if ids[-1] == END else "stop" if text.endswith("==") else "length"
                logps = tuple(-(turn_number + position / 100) for position in range(len(ids)))
                rollouts.append(
                    Rollout(
                        prompt=prompt,
                        group_id=group,
                        completion_ids=ids,
                        logps=logps,
                        versions=(turn_number,) * len(ids),
                        stop_reason=reason,
                        text=text,
                    )
                )
        return rollouts


class ScriptedEnvironment:
    """Answers each turn by its text."""

    def __init__(self, **answers):
        self._answers = answers.pop("answers")
        self.asked = []

    def answer(self, turns):
        self.asked.append([(turn.text, turn.state) for turn in turns])
        return [self._answers.get(turn.text, Step(done=True, state="end")) for turn in turns]


def talk(
    script, answers, *texts, group_size=1, new_tokens=40, frame=("", ""), renderer=None, loaded=LOADED, **settings
):
    sampler = ScriptedSampler(script)
    environment = ScriptedEnvironment(answers=answers)
    config = EnvironmentConfig(**{"name": "calculator", "turns": 3, "turn_tokens": 8, **settings})
    dialogue = Dialogue(sampler, environment, loaded, config, frame, renderer)
    sampling = Sampling(temperature=1.0, max_new_tokens=new_tokens, stop=("==",))
    rollouts = dialogue.generate(prompts(*texts), group_size=group_size, sampling=sampling, seed=11)
    return rollouts, sampler, environment


CALL = Step(observation="7;", state='"a"', parts={"calls": 1.0})
SCRIPT = {"1+2=": "3+4==", "1+2=3+4==7;": "7$", "5=": "5$"}


def test_a_dialogue_is_its_turns_and_observations_token_by_token():
    (first, second), sampler, environment = talk(SCRIPT, {"3+4==": CALL}, "1+2=", "5=")
    assert first.completion_ids == ids_of("3+4==7;7$")
    assert first.trained == (True,) * 5 + (False,) * 2 + (True,) * 2
    assert first.logps == (-1.0, -1.01, -1.02, -1.03, -1.04, 0.0, 0.0, -2.0, -2.01)
    assert first.versions == (1,) * 5 + (FOREIGN_VERSION,) * 2 + (2,) * 2
    assert (first.text, first.stop_reason, first.parts) == ("3+4==7", "eos", {"calls": 1.0})
    assert (first.turn_ends, first.turn_parts) == ((5, 9), {"calls": (1.0, 0.0)}), "each turn is paid apart"
    assert first.prompt.token_ids == ids_of("1+2=")
    assert second.trained == (True, True), "a dialogue says so of each token, however short it is"
    assert (second.completion_ids, second.parts) == (ids_of("5$"), {"calls": 0.0})
    assert [row.group_id for row in (first, second)] == [0, 1]
    # The first state is None; that of a later turn is what the last step gave. Ended dialogues are not asked again.
    assert environment.asked == [[("3+4==", None), ("5", None)], [("7", '"a"')]]
    assert [(call.prompts, call.group_size, call.sampling.max_new_tokens) for call in sampler.calls] == [
        (2, 1, 8),
        (1, 1, 8),
    ]
    assert sampler.calls[0].seed == 11
    assert sampler.calls[1].seed != 11, "later turns have random numbers of their own"
    assert sampler.calls[0].sampling.stop == ("==",)


def test_groups_stay_together():
    rollouts, sampler, _ = talk(SCRIPT, {"3+4==": CALL}, "5=", "1+2=", group_size=3)
    assert [row.group_id for row in rollouts] == [0, 0, 0, 1, 1, 1]
    assert [row.text for row in rollouts] == ["5"] * 3 + ["3+4==7"] * 3
    assert [(call.prompts, call.group_size) for call in sampler.calls] == [(2, 3), (3, 1)]


ENDLESS = {"1=": "2==", "1=2==7;": "2==", "1=2==7;2==7;": "2=="}


@pytest.mark.parametrize(
    ("settings", "completion"),
    [
        ({"turns": 1}, "2=="),
        ({"turns": 2}, "2==7;2=="),
        ({"turns": 3}, "2==7;2==7;2=="),
        # A second turn of 8 tokens has no room behind the first and its observation (3 + 2).
        ({"new_tokens": 12}, "2=="),
        ({"new_tokens": 13}, "2==7;2=="),
        # Without a limit of its own a turn has its share: 12 // 3 tokens.
        ({"turn_tokens": None, "new_tokens": 12}, "2==7;2=="),
    ],
)
def test_an_environment_without_an_end_is_cut_after_a_turn_of_the_policy(settings, completion):
    (rollout,), _, _ = talk(ENDLESS, {"2==": CALL}, "1=", **settings)
    assert rollout.completion_ids == ids_of(completion)
    assert rollout.stop_reason == "length"
    assert rollout.trained[-1], "an observation that nobody reads is not added"


def test_a_turn_that_is_cut_is_not_answered():
    (rollout,), _, environment = talk({"1=": "22222222=="}, {}, "1=")
    assert (rollout.completion_ids, rollout.stop_reason) == (ids_of("22222222"), "length")
    assert environment.asked == []


FAULTY = {
    "the environment failed": FAILED,
    "no tokens for the text": Step(observation="seven"),
    "the end token by its name": Step(observation="7<eos>"),
    "too many tokens": Step(observation="7" * 300),
}


@pytest.mark.parametrize("fault", FAULTY)
def test_a_failure_ends_its_dialogue_alone(fault):
    script = {**SCRIPT, "6=": "6+6=="}
    answers = {"3+4==": CALL, "6+6==": FAULTY[fault]}
    (whole, failed), _, _ = talk(script, answers, "1+2=", "6=", observation_tokens=200)
    assert whole.stop_reason == "eos"
    assert (failed.stop_reason, failed.completion_ids) == ("failed", ids_of("6+6=="))


def test_a_failure_of_every_dialogue_ends_the_run():
    with pytest.raises(
        RunFailed, match=r"'calculator' failed in each of 2 dialogues: ValueError: of the tool"
    ) as caught:
        talk(SCRIPT, {"3+4==": FAILED}, "1+2=", group_size=2)
    assert "\n" not in str(caught.value)


def test_a_dialogue_that_does_not_fit_the_context_is_refused_before_its_first_token():
    with pytest.raises(UserError, match="context"):
        talk(SCRIPT, {}, "5=", new_tokens=127)


def test_the_text_around_an_observation_is_the_template_s():
    """The frame may have special tokens; its end token is left out where the policy has ended its turn itself."""
    script = {"1=": "2==", "1=2==$+7-": "8$", "1=2==$+7-8$+7-": "9$"}
    answers = {"2==": Step(observation="7"), "8": Step(observation="7")}
    (rollout,), _, _ = talk(script, answers, "1=", frame=(f"{EOS}+", "-"))
    assert rollout.completion_ids == ids_of("2==$+7-8$+7-9$")
    expected = [True] * 3 + [False] * 4 + [True] * 2 + [False] * 3 + [True] * 2
    assert list(rollout.trained) == expected


class Rendered:
    """Renders a dialogue as ``of`` says of the problem's text and the exchanges."""

    def __init__(self, of):
        self._of = of

    def control_token(self, text):
        return "9" if "9" in text else None

    def prompts(self, dialogues):
        return [ids_of(self._of(problem.text, exchanges)) for problem, exchanges in dialogues]


def last_answer(text, exchanges):
    """A compaction: what was said before is forgotten."""
    return text + exchanges[-1][1]


def in_full(text, exchanges):
    return text + "".join(said + answer for said, answer in exchanges)


def test_a_turn_that_is_rendered_anew_begins_a_row():
    """A row has the tokens that were drawn, as they were drawn; what the environment said is in its context alone."""
    script = {"1=": "2==", "1=7;": "3==", "1=8;": "4$"}
    answers = {"2==": Step(observation="7;"), "3==": Step(observation="8;")}
    (rollout,), sampler, _ = talk(script, answers, "1=", renderer=Rendered(last_answer))
    assert rollout.completion_ids == ids_of("2==3==4$")
    assert rollout.restarts == ((3, ids_of("1=7;")), (6, ids_of("1=8;")))
    assert rollout.trained == (True,) * 8
    assert rollout.versions == (1,) * 3 + (2,) * 3 + (3,) * 2
    assert rollout.logps[3:6] == (-2.0, -2.01, -2.02)
    assert rollout.text == "2==3==4"
    assert [call.group_size for call in sampler.calls] == [1, 1, 1]


def test_a_rendering_that_goes_on_is_no_new_row():
    whole = talk(ENDLESS, {"2==": CALL}, "1=")[0]
    assert talk(ENDLESS, {"2==": CALL}, "1=", renderer=Rendered(in_full))[0] == whole
    assert whole[0].restarts == ()


def test_rows_and_turns_that_go_on_within_one_rollout():
    """The first reply goes on; at the second the first turn is forgotten; the third goes on from there."""

    def of(text, exchanges):
        return in_full(text, exchanges if len(exchanges) < 2 else exchanges[1:])

    script = {"1=": "2==", "1=2==7;": "3==", "1=3==8;": "4==", "1=3==8;4==5;": "6$"}
    answers = {"2==": Step(observation="7;"), "3==": Step(observation="8;"), "4==": Step(observation="5;")}
    (rollout,), _, _ = talk(script, answers, "1=", renderer=Rendered(of), turns=4)
    assert rollout.completion_ids == ids_of("2==7;3==4==5;6$")
    assert rollout.restarts == ((8, ids_of("1=3==8;")),)
    assert [row.start for row in rollout.rows] == [0, 8]
    assert rollout.trained == (True,) * 3 + (False,) * 2 + (True,) * 6 + (False,) * 2 + (True,) * 2


@pytest.mark.parametrize(("new_tokens", "turns"), [(11, 1), (12, 2), (13, 2), (14, 3)])
def test_what_is_read_and_what_is_drawn_have_the_same_bound(new_tokens, turns):
    """Turns of 8 tokens at most: a context of 4 beyond the prompt and 3 tokens drawn, then of 4 and 6."""
    script = {"1=": "2==", "1=7777": "2=="}
    answers = {"2==": Step(observation="7777")}
    (rollout,), _, _ = talk(script, answers, "1=", renderer=Rendered(last_answer), new_tokens=new_tokens)
    assert len(rollout.completion_ids) == 3 * turns
    assert rollout.stop_reason == "length"


@pytest.mark.parametrize("script", [{"1=": "9=="}, {"1=": "2=="}], ids=["the policy", "the environment"])
def test_who_spells_a_special_token_ends_the_dialogue(script):
    answers = {"9==": Step(observation="7"), "2==": Step(observation="19")}
    whole = {**SCRIPT, **script}
    (_, failed), _, _ = talk(whole, answers, "5=", "1=", renderer=Rendered(last_answer))
    assert (failed.stop_reason, failed.restarts) == ("failed", ())


def test_other_things_are_the_backend_s():
    dialogue = Dialogue(ScriptedSampler({}), ScriptedEnvironment(answers={}), LOADED, EnvironmentConfig("calculator"))
    assert dialogue.version == 4
    assert dialogue.generate([], group_size=2, sampling=Sampling(temperature=1.0, max_new_tokens=4), seed=0) == []


class Sevens:
    """Answers every turn that the stop string ends."""

    def answer(self, turns):
        return [Step(observation="7;" * (1 + len(turn.text) % 2), done=False) for turn in turns]


@pytest.mark.parametrize("top_logps", [0, 3])
def test_log_probs_of_every_turn_are_those_of_the_whole_dialogue(top_logps):
    """One pass over all ids gives the log-probs that the sampler recorded turn by turn."""
    backend = build_hf(RolloutConfig(), loaded=LOADED)
    settings = EnvironmentConfig(name="calculator", turns=4, turn_tokens=5)
    dialogue = Dialogue(backend, Sevens(), LOADED, settings)
    sampling = Sampling(temperature=0.7, max_new_tokens=40, stop=("1", "2", "3", "4", "5"), top_logps=top_logps)
    rollouts = dialogue.generate(prompts("1+2=", "34+5="), group_size=6, sampling=sampling, seed=5)
    assert max(row.trained.count(False) for row in rollouts) >= 6, "some have several turns"
    assert rollouts == dialogue.generate(prompts("1+2=", "34+5="), group_size=6, sampling=sampling, seed=5)
    for rollout in rollouts:
        ids = torch.tensor([[*rollout.prompt.token_ids, *rollout.completion_ids]])
        with torch.no_grad():
            start = len(rollout.prompt.token_ids)
            logp_TV = (LOADED.model(ids).logits[0, start - 1 : -1] / 0.7).log_softmax(-1)
        drawn_T = torch.tensor(rollout.trained)
        expected_T = logp_TV.gather(-1, ids[0, start:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(rollout.logps)[drawn_T], expected_T[drawn_T], atol=1e-4, rtol=0)
        assert not torch.tensor(rollout.logps)[~drawn_T].any()
        if top_logps:
            ids_TK, top_TK = rollout.sampler_top
            expected_TK = logp_TV.gather(-1, ids_TK.long())
            torch.testing.assert_close(top_TK[drawn_T], expected_TK[drawn_T], atol=1e-4, rtol=0)


def test_log_probs_of_every_row_are_those_of_a_pass_over_it():
    """What is trained is what was sampled: a pass behind each row's context gives what the sampler recorded."""
    backend = build_hf(RolloutConfig(), loaded=LOADED)
    settings = EnvironmentConfig(name="calculator", turns=4, turn_tokens=5)
    dialogue = Dialogue(backend, Sevens(), LOADED, settings, renderer=Rendered(last_answer))
    sampling = Sampling(temperature=0.7, max_new_tokens=40, stop=("1", "2", "3", "4", "5"))
    rollouts = dialogue.generate(prompts("1+2=", "34+5="), group_size=6, sampling=sampling, seed=5)
    assert max(len(row.rows) for row in rollouts) == 4
    for rollout in rollouts:
        for row in rollout.rows:
            ids = torch.tensor([[*row.context, *rollout.completion_ids[row.start : row.end]]])
            size = len(row.context)
            with torch.no_grad():
                logp_TV = (LOADED.model(ids).logits[0, size - 1 : -1] / 0.7).log_softmax(-1)
            recorded_T = torch.tensor(rollout.logps[row.start : row.end])
            torch.testing.assert_close(recorded_T, logp_TV.gather(-1, ids[0, size:, None])[:, 0], atol=1e-4, rtol=0)


def letters():
    """A tokenizer of letters with the end token ``<e>``, which can also be spelled."""
    inner = Tokenizer(models.WordLevel({token: n for n, token in enumerate(["<", "<e>", "e", ">"])}))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<e>")


def test_the_name_of_the_end_token_in_an_observation_is_ordinary_text():
    observation = ObservationText(dataclasses.replace(LOADED, tokenizer=letters()), 9, ("", ""))
    assert observation.ids("<e>", last_id=3) == (0, 2, 3)


def test_an_end_token_that_a_tokenizer_makes_of_it_is_a_failure():
    tokenizer = letters()

    class Deaf:
        eos_token_id = 1
        all_special_ids = (1,)

        def __call__(self, text, **options):
            return tokenizer(text, add_special_tokens=False)

    observation = ObservationText(dataclasses.replace(LOADED, tokenizer=Deaf()), 9, ("", ""))
    failure = observation.ids("<e>", last_id=3)
    assert isinstance(failure, Failure)
    assert failure.kind == "control token"
