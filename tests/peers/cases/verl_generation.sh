python3 -m verl.trainer.main_generation trainer.nnodes=1 data.path=own.parquet model.path=small-base
