from slime.ray.placement_group import create_placement_groups, create_training_models
from slime.utils.arguments import parse_args


def train(args):
    models = create_training_models(args, create_placement_groups(args))
    models.train(0)


if __name__ == "__main__":
    train(parse_args())
