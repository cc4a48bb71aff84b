python3 -m verl.trainer.main_ppo --config-path=./plans --config-name=my_ppo data.train_batch_size=64
