"""Problems and prompts: datasets, chat templates, decontamination, order.

    DatasetConfig -> load_problems -> [Problem] -> decontaminate -> render -> [Prompt] -> PromptOrder

Importing this package registers the built-in datasets; heavy packages are imported when a dataset is loaded.
"""

from kl_comedy.data import pocket, sources  # noqa: F401  (registers the datasets)
from kl_comedy.data.load import (
    check_dataset,
    data_hash,
    decontaminate,
    is_on_this_machine,
    load_problems,
    normalize,
)
from kl_comedy.data.prompts import PromptOrder, RenderReport, render

__all__ = [
    "PromptOrder",
    "RenderReport",
    "check_dataset",
    "data_hash",
    "decontaminate",
    "is_on_this_machine",
    "load_problems",
    "normalize",
    "render",
]
