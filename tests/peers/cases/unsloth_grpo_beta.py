from trl import GRPOConfig, GRPOTrainer
from unsloth import FastLanguageModel

model, tokenizer = FastLanguageModel.from_pretrained("example/small-model")
GRPOTrainer(model=model, args=GRPOConfig(beta=0.04), reward_funcs=[len]).train()
