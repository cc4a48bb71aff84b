"""A plugin of the comparison: a reward that completions differ in, and a sampler of mixed versions.

A file of its own without imports from here: the source of a plugin is read, hashed and stored in every run.
"""

import torch

from kl_comedy.records import Rollout
from kl_comedy.registry import REWARDS, ROLLOUTS
from kl_comedy.rollouts.decoding import pick
from kl_comedy.rollouts.hf import uniform_numbers


@REWARDS.register("twin_letters", source="tests", claims=("unit_interval",))
def twin_letters(completion, answer, meta):
    """A reward that most completions differ in: the mean of the codes of its letters, modulo 3."""
    places = [ord(letter) % 3 for letter in completion]
    return sum(places) / max(2 * len(places), 1)


class MixedRollouts:
    """Samples token by token without a cache, each token by the weights of one of the last three versions.

    In a batch of version v, token t of completion n is drawn by version ``v - (t + n) % 3``, at least 0. The numbers
    are those of the ``hf`` backend.
    """

    def __init__(self, loaded):
        self.version = 0
        self._loaded = loaded
        self._weights = {0: self._now()}

    def _now(self):
        return {name: tensor.detach().clone() for name, tensor in self._loaded.causal.state_dict().items()}

    def update_weights(self, version):
        self.version = version
        self._weights[version] = self._now()

    @torch.no_grad()
    def generate(self, prompts, *, group_size, sampling, seed):
        numbers = uniform_numbers(seed, len(prompts) * group_size, sampling.max_new_tokens)
        rows = range(len(prompts) * group_size)
        return [self._draw(prompts[n // group_size], n // group_size, n, sampling, numbers[n]) for n in rows]

    def _draw(self, prompt, group, number, sampling, numbers):
        tokenizer = self._loaded.tokenizer
        ids = []
        logps = []
        versions = []
        reason = "length"
        while len(ids) < sampling.max_new_tokens and reason == "length":
            version = max(0, self.version - (len(ids) + number) % 3)
            inputs = {"input_ids": torch.tensor([[*prompt.token_ids, *ids]]), "use_cache": False}
            output = torch.func.functional_call(self._loaded.causal, self._weights[version], kwargs=inputs)
            logp_V = (output.logits[0, -1] / sampling.temperature).log_softmax(-1)
            token = int(pick(logp_V[None], numbers[len(ids)][None]))
            ids.append(token)
            logps.append(float(logp_V[token]))
            versions.append(version)
            text = tokenizer.decode(ids, skip_special_tokens=True)
            if token == tokenizer.eos_token_id:
                reason = "eos"
            elif any(stop in text for stop in sampling.stop):
                reason = "stop"
        return Rollout(
            prompt=prompt,
            group_id=group,
            completion_ids=tuple(ids),
            logps=tuple(logps),
            versions=tuple(versions),
            stop_reason=reason,
            text=text,
        )

    def close(self):
        pass


@ROLLOUTS.register("twin_mixed", source="tests")
def build_mixed(config, *, loaded):
    """Tokens of several versions in one completion."""
    return MixedRollouts(loaded)
