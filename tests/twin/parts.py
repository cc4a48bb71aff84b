"""A plugin of the comparison: a reward that completions differ in, and a sampler of mixed versions and of dialogues.

A file of its own without imports from here: the source of a plugin is read, hashed and stored in every run.
"""

from dataclasses import dataclass

import torch

from kl_comedy.config.validate import option, parse_record
from kl_comedy.records import FOREIGN_VERSION, Rollout
from kl_comedy.registry import REWARDS, ROLLOUTS
from kl_comedy.rollouts.decoding import pick
from kl_comedy.rollouts.hf import uniform_numbers


@REWARDS.register("twin_letters", source="tests", claims=("unit_interval",))
def twin_letters(completion, answer, meta):
    """A reward that most completions differ in: the mean of the codes of its letters, modulo 3."""
    places = [ord(letter) % 3 for letter in completion]
    return sum(places) / max(2 * len(places), 1)


@dataclass(frozen=True, kw_only=True)
class MixedOptions:
    """``rollout.options`` of the sampler."""

    tools: bool = option(False, "Write tokens of an environment behind some of the policy's.")
    rows: bool = option(False, "With tools: begin a row in the place of some of these.")


class MixedRollouts:
    """Samples token by token without a cache, each token by the weights of one of the last three versions.

    In a batch of version v, token t of completion n is drawn by version ``v - (t + n) % 3``, at least 0. The numbers
    are those of the ``hf`` backend. With ``tools`` a turn ends with each token of an even id: two or three tokens
    follow that the policy did not draw, or, in every second place of ``rows``, another context.
    """

    def __init__(self, loaded, options):
        self.version = 0
        self._loaded = loaded
        self._options = options
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
        read = list(prompt.token_ids)
        drawn = []
        ids = []
        logps = []
        versions = []
        turn_ends = []
        restarts = []
        reason = "length"
        while len(drawn) < sampling.max_new_tokens and reason == "length":
            version = max(0, self.version - (len(drawn) + number) % 3)
            inputs = {"input_ids": torch.tensor([read]), "use_cache": False}
            output = torch.func.functional_call(self._loaded.causal, self._weights[version], kwargs=inputs)
            logp_V = (output.logits[0, -1] / sampling.temperature).log_softmax(-1)
            token = int(pick(logp_V[None], numbers[len(drawn)][None]))
            read.append(token)
            drawn.append(token)
            ids.append(token)
            logps.append(float(logp_V[token]))
            versions.append(version)
            text = tokenizer.decode(drawn, skip_special_tokens=True)
            if token == tokenizer.eos_token_id:
                reason = "eos"
            elif any(stop in text for stop in sampling.stop):
                reason = "stop"
            goes_on = reason == "length" and len(drawn) < sampling.max_new_tokens
            if self._options.tools and goes_on and token % 2 == 0:
                turn_ends.append(len(ids))
                reply = [2 + (token * 5 + place) % 9 for place in range(2 + number % 2)]
                if self._options.rows and (number + len(turn_ends)) % 2:
                    read = [*reversed(prompt.token_ids), *reply]
                    restarts.append((len(ids), tuple(read)))
                    continue
                read += reply
                ids += reply
                logps += [0.0] * len(reply)
                versions += [FOREIGN_VERSION] * len(reply)
        return Rollout(
            prompt=prompt,
            group_id=group,
            completion_ids=tuple(ids),
            logps=tuple(logps),
            versions=tuple(versions),
            stop_reason=reason,
            text=text,
            trained=tuple(version != FOREIGN_VERSION for version in versions) if self._options.tools else (),
            restarts=tuple(restarts),
            turn_ends=(*turn_ends, len(ids)) if self._options.tools else (),
        )

    def close(self):
        pass


@ROLLOUTS.register("twin_mixed", source="tests", options=MixedOptions)
def build_mixed(config, *, loaded):
    """Tokens of several versions in one completion."""
    return MixedRollouts(loaded, parse_record(MixedOptions, config.options, key="rollout.options"))
