"""A reward and a Lightning callback for `kl-comedy train CONFIG --plugin FILE`.

    rewards: [{name: ends_with_answer}]
    callbacks: [{name: print_reward, options: {every: 5}}]

Advantages, policy losses, datasets, rollout backends and corrections register in the same way: CONTRIBUTING.md.
"""

from typing import Any

from lightning.pytorch.callbacks import Callback

from kl_comedy.registry import CALLBACKS, REWARDS


@REWARDS.register(
    "ends_with_answer",
    source="this file",  # the paper or code it comes from
    claims=("binary",),  # its values are 0 and 1
    examples=(
        {"completion": "3 + 4 = 7", "answer": "7", "value": 1.0},
        {"completion": "I do not know", "answer": "7", "value": 0.0},
    ),
)
def ends_with_answer(completion: str, answer: str, meta: dict[str, Any]) -> float:
    """1 where the completion ends with the answer."""
    return float(completion.strip().endswith(answer))


@CALLBACKS.register("print_reward", source="this file")
class PrintReward(Callback):
    """Prints the mean reward every so many updates."""

    def __init__(self, every: int = 10) -> None:
        self.every = every

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *rest: Any) -> None:
        if pl_module.version % self.every == 0:
            print(f"update {pl_module.version}: reward {pl_module.last_metrics['train/reward']:.3f}")
