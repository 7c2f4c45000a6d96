# SPDX-License-Identifier: Apache-2.0
"""Which options of `similarity` to try: one after the other, each from the best so far.

1. `threshold`: how similar text must be
2. `halo_tokens`: how many first tokens of each equal run are computed
3. `max_boundary_drift`: which runs are rejected by their halos, at quantiles of what was measured
4. `min_context_tokens`: how many tokens in front must be equal
5. `w_exact`: the layer below which tokens are moved, under a policy that lets them enter there
6. `w_exact`: how many equal tokens that takes, and how many it takes to be moved at all layers
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from segreuse_extras.similar.options import ALL, FULL_PREFIX
from segreuse_tools.calibrate.search import Options, Setting, halves

THRESHOLDS = (0.5, 0.65, 0.8)
HALOS = (4, 8, 16)
QUANTILES = (0.9, 0.75, 0.5)
CONTEXTS = (8, 32)
DEPTHS = (0.25, 0.5, 0.75)
"""Of the layers, where cuts are tried."""
ENTERING_POLICY = "shift"
"""Tokens enter between layers under this one, where the server's own has them choose."""

Try = Callable[[Sequence[Options]], list[Setting]]
Best = Callable[[Sequence[Setting]], Setting]


def cuts(num_layers: int) -> tuple[int, ...]:
    """Layers at which boundary states are kept while calibrating."""
    found = {round(depth * num_layers) for depth in DEPTHS}
    return tuple(sorted(found - {0, num_layers}))


def reserved(layers: Sequence[int]) -> dict[str, Any]:
    """Options of the engine, which reserves memory for all that is tried, and finds the least
    similar text that is."""
    found: dict[str, Any] = {"threshold": min(THRESHOLDS), "halo_tokens": max(HALOS)}
    found |= {"max_boundary_drift": 1.0, "by_default": False}
    if layers:
        found["w_exact"] = {str(layer): 0 for layer in layers}
    return found


def fit(tried: Try, best_of: Best, layers: Sequence[int], may_enter: bool) -> list[Setting]:
    """Every setting that was tried; the first is without similar text.

    Args:
        tried: measures settings.
        best_of: some of them.
        layers: cuts that can be tried.
        may_enter: whether the server's policy lets tokens enter between layers.
    """
    measured = tried([{}, *(_similar(threshold=it) for it in THRESHOLDS)])
    policy = {} if may_enter else {"policy": ENTERING_POLICY}

    def go_on(proposals: Iterator[Options]) -> None:
        measured.extend(tried([*proposals]))

    for proposed in (_halos, _bounds, _contexts):
        go_on(proposed(best_of(_with_similar(measured))))
    if layers:
        go_on(_at_cuts(best_of(_with_similar(measured)), layers, policy))
        go_on(_tables(best_of([it for it in measured if _cut_of(it) is not None])))
    return measured


def _similar(**options: Any) -> Options:
    return {"similarity": options}


def _with_similar(settings: Sequence[Setting]) -> list[Setting]:
    return [it for it in settings if "similarity" in it.options]


def _laid_over(setting: Setting, **options: Any) -> Options:
    return {**setting.options, "similarity": {**setting.options["similarity"], **options}}


def _halos(best: Setting) -> Iterator[Options]:
    for tokens in HALOS:
        yield _laid_over(best, halo_tokens=tokens)


def _bounds(best: Setting) -> Iterator[Options]:
    choosing = halves(best.trials)[0]
    drifts = sorted(it.drift for it in choosing if it.drift is not None)
    found = [drifts[int(quantile * (len(drifts) - 1))] for quantile in QUANTILES if drifts]
    for bound in dict.fromkeys(float(f"{it:.3g}") for it in found):
        yield _laid_over(best, max_boundary_drift=bound)


def _contexts(best: Setting) -> Iterator[Options]:
    for tokens in CONTEXTS:
        yield _laid_over(best, min_context_tokens=tokens)


def _at_cuts(best: Setting, layers: Sequence[int], policy: Options) -> Iterator[Options]:
    for layer in layers:
        yield {**policy, **_laid_over(best, w_exact={str(layer): 0})}


def _tables(best: Setting) -> Iterator[Options]:
    cut = _cut_of(best)
    for table in (
        {cut: CONTEXTS[0]},
        {cut: 0, ALL: CONTEXTS[1]},
        {cut: CONTEXTS[0], ALL: FULL_PREFIX},
    ):
        yield _laid_over(best, w_exact=table)


def _cut_of(setting: Setting) -> str | None:
    table = setting.options.get("similarity", {}).get("w_exact")
    return None if table is None else next(iter(table))
