from verl.trainer.ppo.ray_trainer import RayPPOTrainer


def look(config, train_dataloader):
    trainer = RayPPOTrainer(config=config, train_dataloader=train_dataloader)
    trainer.world_size = 8
    print(trainer._balance_batch(next(iter(train_dataloader))))


if __name__ == "__main__":
    look({}, [])
