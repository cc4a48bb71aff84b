"""vLLM as sampler: in this process (``vllm``) or as servers (``vllm_server``). vLLM is imported when one is built.

prompts -> sampling_fields -> engine or servers -> Completion -> Converter -> rollouts
learner's weights -> full_weights -> the engine's own reload -> caches reset -> probe -> next version
"""

from kl_comedy.rollouts.vllm.engine import build_vllm
from kl_comedy.rollouts.vllm.servers import build_vllm_server

__all__ = ["build_vllm", "build_vllm_server"]
