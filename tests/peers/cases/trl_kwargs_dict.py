"""TRL: the options in a dictionary."""

from trl import GRPOConfig, GRPOTrainer

options = {"output_dir": "out", "beta": 0.04}
options["num_generations"] = 4
GRPOTrainer(model="example/small-model", args=GRPOConfig(**options), reward_funcs=[len]).train()
