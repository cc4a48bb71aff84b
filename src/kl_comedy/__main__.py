"""``python -m kl_comedy``: the command line of the interpreter at hand, whatever is on the PATH."""

from kl_comedy.cli import run

if __name__ == "__main__":
    run()
