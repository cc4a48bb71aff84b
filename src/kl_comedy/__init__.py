"""kl_comedy: the reference laboratory for KL regularization in RL of language models.

The rooms, and the one direction in which they import each other, are described in
docs/architecture.md. This module stays empty so that ``import kl_comedy.kl`` costs only torch.
"""

__version__ = "0.1.0"
