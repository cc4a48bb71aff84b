import sys

from areal.api.cli_args import GRPOConfig, load_expr_config


def main(arguments):
    config, _ = load_expr_config(arguments, GRPOConfig)
    print(config)


if __name__ == "__main__":
    main(sys.argv[1:])
