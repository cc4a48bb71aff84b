from trl import GRPOConfig, GRPOTrainer

CONFIG = {"beta": 0.03, "epochs": 1}


class Settings:
    LOSS = "dr_grpo"


arguments = GRPOConfig(beta=CONFIG["beta"], loss_type=Settings.LOSS)
GRPOTrainer(model="example/small-model", args=arguments, reward_funcs=[len]).train()
