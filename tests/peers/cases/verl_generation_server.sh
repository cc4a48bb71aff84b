python3 -m verl.trainer.main_generation_server trainer.nnodes=1 data.n_samples=4
