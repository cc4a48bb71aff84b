"""KL terms, and checks of them, inside other trainers: TRL, verl, prime-rl, and any transformers Trainer.

Each module imports the package that it extends; nothing else in kl_comedy imports this one.
"""
