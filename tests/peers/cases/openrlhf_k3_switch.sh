python -m openrlhf.cli.train_ppo_ray --init_kl_coef 0.002 --use_kl_loss --use_kl_estimator_k3 --advantage_estimator group_norm
