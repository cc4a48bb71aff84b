"""Traces cases on demand: a request is a line of JSON on standard input, its answer a line on standard output.

This process loads the device guard before torch and imports everything once. Each case runs in a fork, because it
replaces functions of torch and of the product.
"""

import json
import os
import pickle
import sys
import traceback
from pathlib import Path

from tests.shapes.fake_cuda import load_guard


def _trace_in_fork(request: dict, folder: Path) -> dict:
    """Counts, or ``error``, the text of the exception that the case raised."""
    rank = request["rank"]
    answer_file = folder / "answer.json"
    exchanged = folder / f"{request['name']}-{request['shape']}-{request['layers']}.pickle"
    answer_file.unlink(missing_ok=True)
    pid = os.fork()
    if pid == 0:
        # The fork ends here, whatever happens: it must not read requests.
        try:
            answer_file.write_text(json.dumps(_trace(request, folder, rank, exchanged)))
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    if not answer_file.exists():
        return {"error": "the process that traced the case ended without an answer"}
    return json.loads(answer_file.read_text())


def _trace(request: dict, folder: Path, rank: int, exchanged: Path) -> dict:
    from tests.shapes.cases import trace_case

    of_rank_zero = None
    if rank > 0:
        of_rank_zero = pickle.loads(exchanged.read_bytes())
    try:
        counts, items = trace_case(**request, folder=folder, of_rank_zero=of_rank_zero)
    except Exception as error:  # whatever a planted bug raises
        where = traceback.format_exc(limit=-8)
        return {"error": f"{type(error).__name__}: {error}", "where": where}
    if rank == 0:
        exchanged.write_bytes(pickle.dumps(items))
    return counts


def main(folder: Path) -> None:
    """Answer requests until standard input ends. ``folder`` is for models and answers."""
    load_guard()
    # What every case needs, so that a fork has it.
    import torch
    import transformers.models.llama.modeling_llama
    import transformers.models.qwen2.modeling_qwen2
    import transformers.models.qwen3.modeling_qwen3  # noqa: F401

    import kl_comedy.models.sharding
    import kl_comedy.training.module
    import tests.shapes.trace  # noqa: F401

    torch.set_num_threads(1)
    # Whatever libraries print would be read as an answer.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        answers.write(json.dumps(_trace_in_fork(json.loads(line), folder)) + "\n")
        answers.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
