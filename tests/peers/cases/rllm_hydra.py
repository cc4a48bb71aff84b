import hydra
from rllm.trainer.agent_trainer import AgentTrainer


@hydra.main(config_path="pkg://own.plans", config_name="my_agent_plan", version_base=None)
def main(config):
    AgentTrainer(config=config).train()
