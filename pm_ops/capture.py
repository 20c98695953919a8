"""What cannot be recorded in a CUDA graph says so, before a CUDA call fails and takes the capture along."""

from __future__ import annotations

import torch


def refuse_capture(what: str, *devices: torch.device) -> None:
    """Raise RuntimeError while a graph is captured on the current stream of the current device or of one of these.

    Args:
        what: what cannot be captured, and what to do instead.
        devices: of CUDA, each with its index.
    """
    capturing = torch.cuda.is_current_stream_capturing()
    for device in devices:
        if not capturing and device.index != torch.cuda.current_device():
            with torch.cuda.device(device):
                capturing = torch.cuda.is_current_stream_capturing()
    if capturing:
        raise RuntimeError(f"a CUDA graph is being captured, and {what}")
