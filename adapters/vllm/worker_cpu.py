"""vLLM's CPU worker, with the cache in the layout that was asked for."""

from __future__ import annotations

from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker

from .platform_cpu import open_platform
from .worker import PageMajorWorker


class PageMajorCPUWorker(PageMajorWorker, CPUWorker):
    """Takes ``CPUWorker``'s place in engines that asked for pm_ops."""

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        open_platform()
        super().__init__(vllm_config, *args, **kwargs)
