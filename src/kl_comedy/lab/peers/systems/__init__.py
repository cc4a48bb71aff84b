"""One module per system: its KL flags, and a pure function from flags to what they do."""

from __future__ import annotations

from kl_comedy.lab.peers.reading import System
from kl_comedy.lab.peers.systems import (
    areal,
    ms_swift,
    nemo_rl,
    oat,
    open_instruct,
    openrlhf,
    pipelinerl,
    prime_rl,
    roll,
    skyrl,
    slime,
    tinker,
    torchforge,
    trinity,
    trl,
    verl,
)

SYSTEMS: dict[str, System] = {
    module.SYSTEM.name: module.SYSTEM
    for module in (
        trl,
        verl,
        openrlhf,
        nemo_rl,
        slime,
        skyrl,
        open_instruct,
        prime_rl,
        pipelinerl,
        areal,
        roll,
        tinker,
        trinity,
        oat,
        torchforge,
        ms_swift,
    )
}
