# SPDX-License-Identifier: Apache-2.0
"""The shares of an estimate by size of the cache, as a picture."""

from __future__ import annotations

from pathlib import Path

from segreuse_tools.estimate.gain import Gain
from segreuse_tools.estimate.gain_text import size_name
from segreuse_tools.model_folder import InputError


def draw(gain: Gain, file: Path) -> None:
    """Write a picture; the end of the file's name says which kind.

    Raises:
        InputError: matplotlib is missing, or the file cannot be written.
    """
    try:
        import matplotlib as mpl
    except ModuleNotFoundError:
        raise InputError("--plot needs matplotlib: pip install matplotlib") from None
    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    places = range(len(gain.sizes))
    for name, field in (
        ("prefix caching", "prefix_share"),
        ("any position, this plugin", "any_position_share"),
        ("any position, whole components", "whole_any_position_share"),
    ):
        shares = [getattr(row, field) for row in gain.sizes]
        if None not in shares:
            axes.plot(places, [100 * share for share in shares], marker="o", label=name)
    axes.set_xticks(places, [size_name(row.cache_tokens) for row in gain.sizes])
    axes.set(xlabel="tokens of KV that a cache holds", ylabel="known prompt tokens, %")
    axes.set_ylim(0, 100)
    axes.grid(alpha=0.3)
    axes.legend()
    try:
        figure.savefig(file)
    except (OSError, ValueError) as error:
        raise InputError(f"cannot write {file}: {error}") from None
    finally:
        pyplot.close(figure)
