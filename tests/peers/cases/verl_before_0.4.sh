python3 -m verl.trainer.main_ppo algorithm.adv_estimator=gae algorithm.kl_ctrl.kl_coef=0.001
