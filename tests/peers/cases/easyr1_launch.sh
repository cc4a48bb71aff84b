python3 -m verl.trainer.main config=examples/config.yaml algorithm.kl_coef=0.02 worker.actor.global_batch_size=64
