"""The options of ``pm-ops bench``. What runs is imported when it runs, so that other commands start without it."""

from __future__ import annotations

import argparse
from pathlib import Path

from .cases import SUITES


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options to the command's parser."""
    names = ",".join(SUITES)
    parser.add_argument("--suite", default=names, help=f"comma-separated, of {', '.join(SUITES)} (default: all)")
    parser.add_argument("--case", metavar="TEXT", help="only cases with this in their name, such as '32 KiB'")
    parser.add_argument("--impl", help="comma-separated names of implementations (default: all that are found)")
    parser.add_argument(
        "--peers",
        type=Path,
        metavar="DIR",
        help="a folder with _vllm_fa3_C.abi3.so, _C_stable_libtorch.abi3.so and the kernel files of vLLM and SGLang, "
        "each under its package's path: for peers that are not installed",
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="write <device>.json, .txt and PNG plots there")
    parser.add_argument("--quick", action="store_true", help="fewer shapes and samples")
    parser.add_argument("--device", help="cuda or cpu (default: cuda where there is one)")
    parser.add_argument(
        "--jobs", type=int, help="processes that compile kernels first, 0: none (default: most of the cores on CUDA)"
    )
    parser.add_argument("--share", help=argparse.SUPPRESS)  # which of the kernels: given to the processes of --jobs


def run(options: argparse.Namespace) -> int:
    """Measure, print, write; returns the exit status. Raises ValueError where an option makes no sense here."""
    from .measure import measure

    return measure(options)
