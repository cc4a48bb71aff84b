from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer

OnlineDPOTrainer(model="small-base", reward_funcs=[len], args=OnlineDPOConfig(output_dir="out"))
