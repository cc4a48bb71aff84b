python3 -m verl.trainer.main config=examples/config.yaml worker.actor.global_batch_size=64 trainer.experiment_name=words
