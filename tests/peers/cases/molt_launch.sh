python -m molt.cli.train_rl_ray --algo.advantage.estimator reinforce_baseline --algo.kl.init_coef 0.001
