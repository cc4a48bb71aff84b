import subprocess


def run(command):
    subprocess.run(command, shell=True, check=True)


run(f'python3 -c "from miles.utils.external_utils import get; get({1})"')
arguments = ["--advantage-estimator", "grpo", "--use-kl-loss", "--kl-loss-coef", "0.01", "--kl-loss-type", "k3"]
run("python3 train.py " + " ".join(arguments))
