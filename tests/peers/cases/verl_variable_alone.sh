python -m verl.trainer.main_ppo algorithm.use_kl_in_reward=$USE_KL algorithm.kl_ctrl.kl_coef=0.01
