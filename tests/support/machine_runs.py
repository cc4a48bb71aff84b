"""What the tests of this folder share: the device, a small policy of Qwen2.5's shape, runs in other processes."""

import contextlib
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch

from kl_comedy.config.schema import ModelConfig

DEVICE = os.environ.get("KL_COMEDY_GPU_TESTS_DEVICE", "cuda")
ROOT = Path(__file__).parents[2]
TINY = ROOT / "tests" / "support" / "tiny.yaml"
DEADLINE_S = 240
QUIET = ["train.eval_every=0", "eval.at_start=false", "eval.at_end=false", "train.samples_every=0", "train.threads=1"]
"""No evaluation, no tables of samples."""
ENDS = [1, 5]
KERNELS: dict[str, str] = {}
"""Keys of ``model`` that choose faster kernels, where this version has them; a CPU has only the first."""
if "head_dtype" in ModelConfig.__dataclass_fields__:
    KERNELS["head_dtype"] = "bfloat16"
    if DEVICE == "cuda":
        KERNELS["attention"] = "varlen"


def save_policy(folder, *, vocabulary=512, **changes):
    """Random weights of a small Qwen2.5: grouped queries, biases on them, tied embeddings, two end tokens."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    characters = [*"0123456789+-= \n#.", *map(chr, range(0x4E00, 0x4E00 + vocabulary))]
    entries = ["<pad>", "<eos>", *characters][:vocabulary]
    tokenizer = Tokenizer(models.WordLevel({entry: number for number, entry in enumerate(entries)}))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", padding_side="left"
    ).save_pretrained(folder)
    sizes = {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 256}
    shape = sizes | heads | changes
    config = Qwen2Config(vocab_size=vocabulary, **shape, tie_word_embeddings=True, initializer_range=0.05)
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(config)
    model.generation_config.eos_token_id = ENDS
    model.save_pretrained(folder)


class Training:
    """``kl-comedy train`` in a process of its own: what starts it sets no variable of CUDA.

    ``device`` "cpu" hides the GPU. :meth:`wait` gives the run's folder.
    """

    def __init__(self, folder, *words, config=TINY, device=DEVICE, env=()):
        folder.mkdir(exist_ok=True)
        self.folder = folder
        self._log = folder / "output.txt"
        environment = os.environ | dict(env)
        if device == "cpu":
            environment["CUDA_VISIBLE_DEVICES"] = ""
        # A run must set it for itself: without it cuBLAS is not deterministic.
        environment.pop("CUBLAS_WORKSPACE_CONFIG", None)
        environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), environment.get("PYTHONPATH", "")])
        command = [sys.executable, "-m", "kl_comedy.cli", "train", str(config), f"output={folder}", *QUIET, *words]
        with self._log.open("a") as log:
            self._process = subprocess.Popen(
                command, env=environment, stdout=log, stderr=log, cwd=folder, start_new_session=True
            )

    @property
    def output(self):
        return self._log.read_text()

    def wait(self):
        try:
            code = self._process.wait(DEADLINE_S)
        finally:
            self.kill()
        assert code == 0, self.output[-3000:]
        return self.run

    @property
    def run(self):
        (summary,) = self.folder.glob("*/summary.json")
        return summary.parent

    def wait_for_checkpoint(self, step):
        deadline = time.monotonic() + DEADLINE_S
        while not list(self.folder.glob(f"*/checkpoints/step-{step:08d}.ckpt")):
            assert self._process.poll() is None, self.output[-3000:]
            assert time.monotonic() < deadline, self.output[-3000:]
            time.sleep(0.005)

    def kill(self):
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


def together(trainings):
    """The folders of runs that were started together."""
    try:
        return [training.wait() for training in trainings]
    finally:
        for training in trainings:
            training.kill()


def metrics_of(run):
    """``(step, name)`` to value, without times."""
    metrics = {}
    for line in (run / "spool.jsonl").read_text().splitlines():
        event = json.loads(line)
        if event.get("kind") != "metrics":
            continue
        for name, value in event["data"].items():
            if not name.startswith("time/"):
                metrics[event["step"], name] = value
    return metrics


def weights_of(run):
    from safetensors.torch import load_file

    return load_file(run / "policy" / "model.safetensors")


def digest_of(run):
    return hashlib.sha256((run / "policy" / "model.safetensors").read_bytes()).hexdigest()


def shorn(run, folder):
    """A copy of a finished run, as if it had been killed before its last checkpoint."""
    shutil.copytree(run, folder / run.name)
    (folder / run.name / "summary.json").unlink()
    shutil.rmtree(max((folder / run.name / "checkpoints").glob("step-*.ckpt")))
