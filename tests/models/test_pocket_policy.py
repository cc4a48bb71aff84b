"""The pocket policy as a whole, in its tiny preset: state after the warm start, cache, folder, RL on it."""

import copy
import os
import subprocess
import sys

import pytest
import torch

from kl_comedy.config.schema import DatasetConfig, ModelConfig, RolloutConfig
from kl_comedy.data.pocket import pocket_problems
from kl_comedy.errors import UserError
from kl_comedy.kl import KLTerm, kl_surrogate
from kl_comedy.models import LoadedModel, load_model, pocket
from kl_comedy.records import Prompt
from kl_comedy.rewards import score
from kl_comedy.rollouts import Sampling, build_hf
from passes import token_pass

TINY = ModelConfig(options={"preset": "tiny"}, device="cpu")
ONE_DIGIT = {"digits": 1}


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    """One cache for the module: the tiny policy is trained once, in seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KL_COMEDY_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture
def loaded():
    return load_model(TINY)


def prompts(loaded: LoadedModel, split: str, limit: int) -> list[Prompt]:
    asked = []
    for problem in pocket_problems(DatasetConfig(split=split, limit=limit, options=ONE_DIGIT), key="data"):
        token_ids = tuple(loaded.tokenizer(problem.text)["input_ids"])
        asked.append(Prompt(problem=problem, text=problem.text, token_ids=token_ids))
    return asked


def sample(loaded, asked, *, seed, group_size=8, temperature=1.0):
    """Rollouts of ``asked`` and the verified reward of each."""
    backend = build_hf(RolloutConfig(), loaded=loaded)
    sampling = Sampling(temperature=temperature, max_new_tokens=24)
    rollouts = backend.generate(asked, group_size=group_size, sampling=sampling, seed=seed)
    answers = [rollout.prompt.problem.answer for rollout in rollouts]
    rewards = score("exact_answer", completions=[rollout.text for rollout in rollouts], answers=answers)
    return rollouts, torch.tensor([reward.value for reward in rewards])


@pytest.fixture(scope="module")
def warm_start_samples(cache):
    """Rollouts and rewards of the policy as it is after the warm start, 8 for each of 60 held-out problems."""
    loaded = load_model(TINY)
    return sample(loaded, prompts(loaded, "heldout", 60), seed=0)


def has_the_format(rollout):
    """Two steps, separated by a semicolon, and an end."""
    if rollout.stop_reason != "eos":
        return False
    return rollout.text.count("=") == 2 and rollout.text.count(";") == 1


def test_the_warm_start_knows_the_format(warm_start_samples):
    rollouts, _ = warm_start_samples
    with_format = [rollout for rollout in rollouts if has_the_format(rollout)]
    assert len(with_format) > 0.95 * len(rollouts)


def test_the_warm_start_is_often_wrong(warm_start_samples):
    _, rewards = warm_start_samples
    assert 0.15 < rewards.mean() < 0.6


def test_many_groups_have_both_verdicts(warm_start_samples):
    """They carry the signal: a group of equal rewards has no advantage."""
    _, rewards = warm_start_samples
    mean_reward = rewards.view(-1, 8).mean(1)
    has_both = (mean_reward > 0) & (mean_reward < 1)
    assert has_both.float().mean() > 0.4


def test_the_second_load_reads_the_cached_folder(loaded, monkeypatch, capsys):
    monkeypatch.setattr(pocket, "warm_start", lambda *args, **kwargs: pytest.fail("trained again"))
    state = torch.get_rng_state()
    model = pocket.load_pocket(TINY)
    assert torch.equal(state, torch.get_rng_state()), "loading leaves the global random numbers alone"
    assert capsys.readouterr() == ("", "")
    assert not model.training
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, loaded.model.state_dict()[name]), name


def test_the_tokenizer_of_the_pocket_policy_pads_left(loaded):
    assert loaded.tokenizer.padding_side == "left"


@pytest.fixture
def from_folder(loaded):
    """The policy loaded from its folder in the cache, as any other source."""
    folder = pocket.pocket_folder(pocket.recipe_from_options({"preset": "tiny"}))
    return load_model(ModelConfig(source=str(folder), device="cpu"))


def test_the_tokenizer_in_the_cached_folder_is_that_of_the_policy(loaded, from_folder):
    ids = loaded.tokenizer("3+9+5=")["input_ids"]
    assert from_folder.tokenizer("3+9+5=")["input_ids"] == ids
    assert from_folder.tokenizer.decode(ids) == "3+9+5="
    assert from_folder.tokenizer.pad_token_id == 0
    assert from_folder.tokenizer.eos_token_id == 1


def test_the_model_in_the_cached_folder_is_the_policy(loaded, from_folder):
    assert from_folder.model.generation_config.eos_token_id == 1
    ids = loaded.tokenizer("3+9+5=", return_tensors="pt")["input_ids"]
    assert torch.equal(from_folder.model(ids).logits, loaded.model(ids).logits)


@pytest.mark.slow
def test_two_processes_at_once_build_one_policy_and_a_damaged_one_is_built_again(tmp_path, monkeypatch, capsys):
    code = (
        "from kl_comedy.config.schema import ModelConfig as M; from kl_comedy.models.pocket import load_pocket\n"
        "m = load_pocket(M(options={'preset': 'tiny', 'warmstart_steps': 30}))\n"
        "print(float(m.lm_head.weight.double().sum()))"
    )
    env = {**os.environ, "KL_COMEDY_CACHE": str(tmp_path)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    both = [subprocess.Popen([sys.executable, "-c", code], env=env, **pipes) for _ in range(2)]
    (out, err), (other_out, other_err) = [process.communicate(timeout=120) for process in both]
    assert [process.returncode for process in both] == [0, 0], err + other_err
    assert out == other_out != ""
    assert (err + other_err).count("30/30 updates") == 1
    monkeypatch.setenv("KL_COMEDY_CACHE", str(tmp_path))
    (weights,) = tmp_path.glob("pocket/*/model.safetensors")
    weights.write_bytes(weights.read_bytes()[:-1] + b"\xff")
    model = pocket.load_pocket(ModelConfig(options={"preset": "tiny", "warmstart_steps": 30}, device="cpu"))
    assert "damaged (model.safetensors has changed); building it again" in capsys.readouterr().err
    assert float(model.lm_head.weight.detach().double().sum()) == pytest.approx(float(out), abs=1e-5)


def test_a_tokenizer_of_its_own_is_refused():
    with pytest.raises(UserError, match=r"model\.tokenizer: got 'x'"):
        load_model(ModelConfig(tokenizer="x", device="cpu"))


@pytest.mark.parametrize("preset", ["tny", ["tiny"], {"tiny": 1}, 3], ids=["misspelled", "list", "mapping", "number"])
def test_a_preset_that_is_none_is_refused(preset):
    with pytest.raises(UserError, match=r"model\.options\.preset: got .*allowed: base, tiny"):
        pocket.recipe_from_options({"preset": preset})


@pytest.mark.parametrize("name", ["revision", "gguf_file"])
def test_settings_of_other_sources_are_refused(name):
    with pytest.raises(UserError, match=rf"model\.{name}: got 'x'; allowed: null with model.source: pocket"):
        load_model(ModelConfig(device="cpu", **{name: "x"}))


def rloo(loaded, term, *, beta, lr, updates, seed=0):
    """Plain RLOO on 16 prompts x 8 an update, with ``beta`` times the surrogate of one KL term."""
    train = prompts(loaded, "train", 512)
    reference = copy.deepcopy(loaded.model).requires_grad_(False)
    optimizer = torch.optim.AdamW(loaded.model.parameters(), lr=lr, weight_decay=0.0)
    for step in range(updates):
        first = 16 * (step + 40 * seed)
        asked = [train[number % len(train)] for number in range(first, first + 16)]
        rollouts, rewards = sample(loaded, asked, seed=1000 * (seed + 1) + step)
        groups = rewards.view(16, 8)
        # 8 / 7 times the distance from the mean of the group is the distance from the mean of the 7 others.
        advantage_B = ((groups - groups.mean(1, keepdim=True)) * 8 / 7).flatten()
        batch = pad(rollouts)
        logp_BT = token_pass(loaded.model, **batch, temperature=1.0, chunk_elements=2**24).logp_BT
        with torch.no_grad():
            ref_logp_BT = token_pass(reference, **batch, temperature=1.0, chunk_elements=2**24).logp_BT
        sampled = {"ref_logp_BT": ref_logp_BT, "behaviour_logp_BT": logp_BT.detach(), "mask_BT": batch["mask_BT"]}
        cost_BT = kl_surrogate(term, logp_BT=logp_BT, **sampled)
        loss = (beta * cost_BT - advantage_B[:, None] * logp_BT).sum() / batch["mask_BT"].sum()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(loaded.model.parameters(), 1.0)
        optimizer.step()


def heldout(loaded, *, seed):
    """Sampled reward on held-out problems and the mean length of a completion in characters."""
    rollouts, rewards = sample(loaded, prompts(loaded, "heldout", 60), seed=seed)
    return float(rewards.mean()), sum(len(rollout.completion_ids) for rollout in rollouts) / len(rollouts)


def test_rl_improves_the_warm_started_policy(loaded):
    """With k1 in the reward it climbs by 0.2 within seconds (five seeds climbed by 0.37 to 0.44 in 60 updates)."""
    before, _ = heldout(loaded, seed=1)
    rloo(loaded, KLTerm(estimator="k1", placement="reward"), beta=0.03, lr=1e-3, updates=40)
    after, _ = heldout(loaded, seed=2)
    assert after > before + 0.2, f"{before:.3f} -> {after:.3f}"


def pad(rollouts):
    """Rollouts with prompts of one length as the tensors of ``token_pass``."""
    length = max(len(rollout.completion_ids) for rollout in rollouts)
    prompt_ids_BP = torch.tensor([rollout.prompt.token_ids for rollout in rollouts])
    ids_BT = torch.zeros(len(rollouts), length, dtype=torch.long)
    mask_BT = torch.zeros(len(rollouts), length, dtype=torch.bool)
    for row, rollout in enumerate(rollouts):
        tokens = len(rollout.completion_ids)
        ids_BT[row, :tokens] = torch.tensor(rollout.completion_ids)
        mask_BT[row, :tokens] = True
    return {
        "prompt_ids_BP": prompt_ids_BP,
        "prompt_mask_BP": torch.ones_like(prompt_ids_BP),
        "ids_BT": ids_BT,
        "mask_BT": mask_BT,
    }
