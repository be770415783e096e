"""Drawings with matplotlib, for those who have it."""

from __future__ import annotations

from typing import Any, Mapping

import numpy as np

from .errors import Unsupported


def _axes(ax: Any) -> Any:
    if ax is not None:
        return ax
    try:
        import matplotlib.pyplot as plt
    except ImportError:
        raise Unsupported(
            "matplotlib is not installed, expected it for drawings: pip install 'waybill[plot]'"
        ) from None
    return plt.subplots(layout="constrained")[1]


def heat_map(values: Any, ax: Any, title: str, xlabel: str, ylabel: str) -> Any:
    """One square a pair of ranks."""
    ax = _axes(ax)
    image = ax.imshow(values, cmap="viridis", interpolation="nearest")
    ax.figure.colorbar(image, ax=ax, label=title)
    ax.set(xlabel=xlabel, ylabel=ylabel, title=title)
    return ax


def bars(series: Mapping[str, Any], ax: Any, title: str) -> Any:
    """A bar a rank and series; a line at the mean of the first series."""
    ax = _axes(ax)
    width = 0.8 / len(series)
    for i, (label, values) in enumerate(series.items()):
        ranks = np.arange(len(values))
        ax.bar(ranks + (i - (len(series) - 1) / 2) * width, values, width, label=label)
    first = next(iter(series.values()))
    ax.axhline(float(np.mean(first)), color="grey", linewidth=1, linestyle="--", label="mean")
    ax.set(xlabel="rank", title=title)
    ax.legend()
    return ax
