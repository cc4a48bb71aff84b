from settings import load
from trl import GRPOConfig, GRPOTrainer

options = load("run.json")
GRPOTrainer(model="example/small-model", args=GRPOConfig(**options), reward_funcs=[len]).train()
