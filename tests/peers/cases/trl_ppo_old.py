from trl import PPOConfig, PPOTrainer

PPOTrainer(PPOConfig(init_kl_coef=0.15, ppo_epochs=2), "small-base")
