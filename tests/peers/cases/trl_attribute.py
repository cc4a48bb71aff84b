"""TRL: the coefficient is set after the config was made."""

from trl import GRPOConfig, GRPOTrainer

arguments = GRPOConfig(output_dir="out", num_generations=8)
arguments.beta = 0.04
GRPOTrainer(model="example/small-model", args=arguments, reward_funcs=[len], train_dataset=[]).train()
