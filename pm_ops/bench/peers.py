"""Everything that can be measured: pm_ops, plain torch, and the peers that are found on this machine."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import torch

from .baseline import Torch
from .implementation import Implementation, Missing
from .ours import PmOps, PmOpsByLayer, PmOpsFA3, PmOpsMLATriton
from .peer_fa3 import FA3
from .peer_flashinfer import FlashInfer
from .peer_gated_delta import FLA, SGLangGatedDelta, VLLMGatedDelta
from .peer_mla import FlashInferLatent, FlashMLA, VLLMLatent
from .peer_sglang import SGLang, SGLangOneLaunch
from .peer_vllm import VLLM
from .peer_vllm_mamba import VLLMMamba
from .peer_vllm_swap import VLLMSwap, VLLMSwapTriton
from .transfer_torch import TorchStaged

Factory = Callable[[Path | None, torch.device], Implementation]

FACTORIES: dict[str, Factory] = {
    "pm_ops": lambda folder, device: PmOps(),
    "pm_ops_by_layer": lambda folder, device: PmOpsByLayer(),
    "pm_ops_fa3": lambda folder, device: _gpu(device, lambda: PmOpsFA3(FA3(folder))),
    "pm_ops_mla_triton": lambda folder, device: _gpu(device, PmOpsMLATriton),
    "fa3": lambda folder, device: _gpu(device, lambda: FA3(folder)),
    "flashinfer": lambda folder, device: _gpu(device, FlashInfer),
    "fla": lambda folder, device: _gpu(device, lambda: FLA(folder)),
    "vllm_gated_delta": lambda folder, device: _gpu(device, lambda: VLLMGatedDelta(folder)),
    "sglang_gated_delta": lambda folder, device: _gpu(device, lambda: SGLangGatedDelta(folder)),
    "vllm": lambda folder, device: _gpu(device, lambda: VLLM(folder)),
    "vllm_mamba": lambda folder, device: _gpu(device, lambda: VLLMMamba(folder)),
    "vllm_swap": lambda folder, device: _gpu(device, lambda: VLLMSwap(folder)),
    "vllm_swap_triton": lambda folder, device: _gpu(device, lambda: VLLMSwapTriton(folder)),
    "sglang": lambda folder, device: _gpu(device, lambda: SGLang(folder)),
    "sglang_one_launch": lambda folder, device: _gpu(device, lambda: SGLangOneLaunch(folder)),
    "flashmla": lambda folder, device: _gpu(device, lambda: FlashMLA(folder)),
    "vllm_mla": lambda folder, device: _gpu(device, lambda: VLLMLatent(folder)),
    "flashinfer_mla": lambda folder, device: _gpu(device, FlashInferLatent),
    "torch": lambda folder, device: Torch(device),
    "torch_staged": lambda folder, device: TorchStaged(),
}
"""By name, ours first; each takes the folder of peers' files and the device, and raises Missing."""


def find(
    names: Iterable[str], folder: Path | None, device: torch.device
) -> tuple[list[Implementation], dict[str, str]]:
    """The implementations of these names that are there, and for the others the reason why they are not.

    Raises:
        ValueError: a name is unknown.
    """
    wanted = list(names)
    unknown = [name for name in wanted if name not in FACTORIES]
    if unknown:
        raise ValueError(f"--impl {', '.join(unknown)} is unknown; there are {', '.join(FACTORIES)}")
    found, missing = [], {}
    for name, factory in FACTORIES.items():
        if name in wanted:
            try:
                found.append(factory(folder, device))
            except Missing as reason:
                missing[name] = str(reason)
    return found, missing


def _gpu(device: torch.device, make: Callable[[], Implementation]) -> Implementation:
    if device.type != "cuda":
        raise Missing("its kernels need a CUDA device")
    return make()
