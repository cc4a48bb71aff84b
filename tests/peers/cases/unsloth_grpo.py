"""A GRPO run through Unsloth: importing unsloth replaces TRL's GRPOConfig and its loss."""

from trl import GRPOConfig, GRPOTrainer
from unsloth import FastLanguageModel

model, tokenizer = FastLanguageModel.from_pretrained("example/small-model", max_seq_length=1024, load_in_4bit=True)
model = FastLanguageModel.get_peft_model(model, r=16, target_modules=["q_proj", "v_proj"])
arguments = GRPOConfig(output_dir="out", num_generations=8, max_completion_length=256, learning_rate=5e-6)
trainer = GRPOTrainer(model=model, args=arguments, reward_funcs=[len], train_dataset=[], processing_class=tokenizer)
trainer.train()
