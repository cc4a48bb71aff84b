from trl import SFTConfig, SFTTrainer
from unsloth import FastLanguageModel

model, tokenizer = FastLanguageModel.from_pretrained("example/small-model")
SFTTrainer(model=model, args=SFTConfig(output_dir="out"), train_dataset=[]).train()
