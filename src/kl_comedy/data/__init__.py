"""Problems and prompts: datasets by name or file, procedural tasks, chat templates, decontamination, order.

    DatasetConfig -> load_problems -> [Problem] -> decontaminate -> render -> [Prompt] -> PromptOrder

Importing this room registers the built-in datasets; their heavy packages are imported when one is loaded.
"""

from kl_comedy.data import pocket
from kl_comedy.data import sources as files
from kl_comedy.data import sources as gym
from kl_comedy.data import sources as hub
from kl_comedy.data.load import data_hash, decontaminate, load_problems, normalize
from kl_comedy.data.prompts import PromptOrder, RenderReport, render

BUILT_IN = (files, gym, hub, pocket)
"""The modules whose import registers the built-in datasets."""

__all__ = [
    "BUILT_IN",
    "PromptOrder",
    "RenderReport",
    "data_hash",
    "decontaminate",
    "load_problems",
    "normalize",
    "render",
]
