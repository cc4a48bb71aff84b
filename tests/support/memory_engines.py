"""The backend ``memory``: engines beside the trainer that are a second model in rank 0's memory, for fast tests."""

import copy
import dataclasses
import threading

from kl_comedy.models.weights import copy_into, stream_weights
from kl_comedy.records import Capabilities
from kl_comedy.registry import ROLLOUTS
from kl_comedy.rollouts.hf import HFRollouts


class MemoryEngines:
    """``events``: what happened, in order: ("publish" | "load" | "generate", version)."""

    last = None

    def __init__(self, config, loaded, leader):
        self.version = -1
        self.restarts = 0
        self.events = []
        self.closed = False
        self._source = loaded.model
        self._leader = leader
        self._model_lock = threading.Lock()
        self._staged = None
        if leader:
            # The other ranks have no engine; their part of an update is to help gather the weights.
            first_weight = next(loaded.model.parameters())
            assert not hasattr(first_weight, "full_tensor"), "a copy of shards is not a whole model"
            self._model = copy.deepcopy(loaded.model).requires_grad_(False).eval()
            self._sampler = HFRollouts(dataclasses.replace(loaded, model=self._model), batch_sequences=256)
            self._sampler.call_before_each_pass(self._between_tokens)
        MemoryEngines.last = self

    def publish(self, version):
        weights = []
        for bucket in stream_weights(self._source):
            for name, tensor in bucket:
                weights.append((name, tensor.clone()))
        self._staged = (version, weights)
        self.events.append(("publish", version))

    def load(self):
        version, weights = self._staged
        with self._model_lock:
            copy_into(self._model, [weights])
            self._sampler.update_weights(version)
            self.version = version
        self.events.append(("load", version))
        return version

    def generate(self, prompts, **settings):
        self.events.append(("generate", self.version))
        with self._model_lock:
            return self._sampler.generate(prompts, **settings)

    def _between_tokens(self):
        # A load that waits gets the model here: weights may change between two tokens.
        self._model_lock.release()
        self._model_lock.acquire()

    def work_in(self, folder):
        pass

    def cpu_seconds(self):
        return 0.0

    def close(self):
        self.closed = True


if "memory" not in ROLLOUTS:

    @ROLLOUTS.register(
        "memory",
        source="tests",
        summary="A second model in rank 0's memory.",
        capabilities=Capabilities(in_trainer_ranks=False, updates_between_tokens=True, gives_kept=True),
    )
    def build_memory(config, *, loaded, leader=True):
        return MemoryEngines(config, loaded, leader)
