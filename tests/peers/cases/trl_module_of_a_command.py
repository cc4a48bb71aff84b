from trl import GRPOConfig, GRPOTrainer


def launch(model, data):
    """Called by another file, with a config of its own."""
    GRPOTrainer(model, args=GRPOConfig(beta=0.04), train_dataset=data).train()
