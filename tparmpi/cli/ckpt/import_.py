"""`tparmpi ckpt import`: copy safetensors files to a checkpoint."""

from __future__ import annotations

import argparse
from typing import Any

SUMMARY = "copy safetensors files to a checkpoint"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments. Local."""
    parser.description = (
        "Copies safetensors files to a checkpoint. A mapping splits, merges and turns "
        "tensors and renames them; --remap renames after it. Holds one tensor at a "
        "time. Needs the extra tparmpi[safetensors]."
    )
    parser.add_argument(
        "source",
        metavar="FILE",
        help=".safetensors, .safetensors.index.json, or a folder with one of them",
    )
    parser.add_argument("target", metavar="NEW", help="folder of the new checkpoint")
    parser.add_argument(
        "--mapping",
        metavar="FILE",
        help="TOML file of transforms and renames, as docs/checkpoints.md describes",
    )
    parser.add_argument(
        "--remap",
        nargs=2,
        action="append",
        default=[],
        metavar=("REGEX", "REPLACEMENT"),
        help=r"rename: --remap '^h\.' 'blocks.'; may be repeated",
    )
    parser.add_argument(
        "--files", type=int, default=1, metavar="N", help="data files (%(default)s)"
    )


def run(arguments: argparse.Namespace) -> tuple[int, list[str], Any]:
    """Exit code, lines to print, the same for programs. Local."""
    from pathlib import Path

    from tparmpi.errors import CheckpointError
    from tparmpi.io import copies, weights
    from tparmpi.io.mapping import WeightMapping, read_mapping

    source = Path(arguments.source)
    if not weights.is_weights(source):
        raise CheckpointError(
            f"{source} holds no safetensors files; give one, or their folder"
        )
    mapping = WeightMapping([], [])
    if arguments.mapping is not None:
        mapping = read_mapping(arguments.mapping)
    path = copies.convert(
        source,
        arguments.target,
        files=arguments.files,
        transforms=mapping.transforms,
        remap=[*mapping.remap, *arguments.remap],
    )
    facts = {"source": str(source), "path": str(path)}
    return 0, [f"{source}: imported to {path}"], facts
