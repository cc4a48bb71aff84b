"""Traces cases on demand: a request is a line of JSON on standard input, its answer a line on standard output.

This process loads the device guard before torch and imports everything once. Each case runs in a fork, because it
replaces functions of torch and of the product.
"""

import functools
import gc
import json
import os
import pickle
import sys
import traceback
from pathlib import Path

from tests.shapes.fake_cuda import load_guard


def _answer(request: dict, folder: Path) -> dict:
    """Counts without a bug and with each of the ``plants``, which are lists of bugs that are there together.

    By the names of the bugs, joined; ``error`` in the place of counts where it was raised. A fork loads the case, and a
    fork of that one runs each update.
    """
    in_fork(lambda: _load_and_update(request, folder))
    counts = {}
    for number, names in enumerate([[], *request["plants"]]):
        file = folder / f"counts-{number}.json"
        counts["+".join(names)] = {"error": "the process ended without counts"}
        if file.exists():
            counts["+".join(names)] = json.loads(file.read_text())
            file.unlink()
    return counts


def in_fork(action) -> None:
    """Call ``action`` in a fork, and wait for its end. What it raises is printed there."""
    pid = os.fork()
    if pid == 0:
        # The fork must end here, or it would read requests too.
        try:
            import torch

            # A fork makes torch's pool of threads anew at its first use. Left to autograd's threads, one may find none.
            torch.set_num_threads(1)
            action()
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    os.waitpid(pid, 0)


def _load_and_update(request: dict, folder: Path) -> None:
    from tests.shapes.cases import loaded_case
    from tests.shapes.plants import PLANTS

    case = {key: request[key] for key in ("name", "shape", "layers", "rank")}
    exchanged = folder / f"{case['name']}-{case['shape']}-{case['layers']}.pickle"
    of_rank_zero = None
    if case["rank"] > 0:
        of_rank_zero = pickle.loads(exchanged.read_bytes())
    with loaded_case(**case, folder=folder, of_rank_zero=of_rank_zero) as loaded:

        def update(number: int, names: list[str]) -> None:
            for name in names:
                PLANTS[name].install(case["rank"])
            try:
                counts = loaded.update()
            except Exception as error:  # whatever a bug raises
                counts = {"error": f"{type(error).__name__}: {error}", "where": traceback.format_exc(limit=-8)}
            (folder / f"counts-{number}.json").write_text(json.dumps(counts))
            if case["rank"] == 0 and not names:
                exchanged.write_bytes(pickle.dumps(loaded.exchanges.items))

        for number, names in enumerate([[], *request["plants"]]):
            in_fork(functools.partial(update, number, names))


def main(folder: Path) -> None:
    """Answer requests until standard input ends. ``folder`` is for models and answers."""
    load_guard()
    # What every case needs, so that a fork has it.
    import tests.shapes.trace  # noqa: F401
    import transformers.models.llama.modeling_llama
    import transformers.models.qwen2.modeling_qwen2
    import transformers.models.qwen3.modeling_qwen3  # noqa: F401

    import kl_comedy.models.sharding
    import kl_comedy.training.module

    # Counts must not depend on when it runs: what only a collector frees counts as held. What is imported is not looked
    # at when it does run.
    gc.disable()
    gc.freeze()
    _ = kl_comedy.training.module
    # Whatever libraries print would be read as an answer.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        answers.write(json.dumps(_answer(json.loads(line), folder)) + "\n")
        answers.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
