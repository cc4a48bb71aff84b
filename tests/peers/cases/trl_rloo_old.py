from trl import RLOOConfig, RLOOTrainer

arguments = RLOOConfig(output_dir="words", rloo_k=4, kl_coef=0.03, total_episodes=1000)
RLOOTrainer(config=arguments, policy="small", ref_policy="small", reward_model="judge").train()
