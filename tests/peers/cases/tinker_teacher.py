import chz
from tinker_cookbook.distillation import train_on_policy
from tinker_cookbook.distillation.datasets import TeacherConfig


@chz.chz
class CLIConfig:
    model_name: str = "small"
    teacher: str = "large"


def main(cli):
    teacher = TeacherConfig(base_model=cli.teacher)
    return train_on_policy.Config(model_name=cli.model_name, teacher_config=teacher, learning_rate=1e-4)
