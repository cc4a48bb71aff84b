"""Inference engines: vLLM in this process (``vllm``), and servers beside the trainer (``vllm_server``, ``hf_server``).

prompts -> fields of a request -> servers -> completions -> rollouts
learner's weights -> publish -> folder -> load -> every server -> checksum, probe -> the next version
"""

from kl_comedy.rollouts.engines.servers import EngineRollouts, build_hf_server, build_vllm_server
from kl_comedy.rollouts.engines.vllm import build_vllm

__all__ = ["EngineRollouts", "build_hf_server", "build_vllm", "build_vllm_server"]
