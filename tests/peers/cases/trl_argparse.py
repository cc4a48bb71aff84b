import argparse

from trl import GRPOConfig, GRPOTrainer

parser = argparse.ArgumentParser()
parser.add_argument("--beta", type=float, default=0.02, help="for example --beta 0.5")
args = parser.parse_args()
GRPOTrainer(model="example/small-model", args=GRPOConfig(beta=args.beta), reward_funcs=[len]).train()
