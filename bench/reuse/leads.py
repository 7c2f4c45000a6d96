# SPDX-License-Identifier: Apache-2.0
"""Ways to recompute some of the moved tokens, by name: what is compared at equal work.

Each is given the same first reading and a number of tokens, of which it may compute no more,
counted as often as it computes them. `default` is the policy `focus` as it is, and each other lead
differs from it in one thing; but `shift`, and `focus`, which neither levels nor carries. `exact`,
`foreseen`, `attributed` and `helpers` know full prefill, which no server does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch

from bench.reuse.attribution import attributions
from bench.reuse.decoder import KV, Carry, Side
from bench.reuse.scene import Answered, Scene
from vllm_segreuse.kernels.pages import Share
from vllm_segreuse.policies.focus import LEVELLING
from vllm_segreuse.prefill.carried import FROM_BEHIND, FROM_THE_FRONT
from vllm_segreuse.prefill.selection import BEGINNING

Lead = Callable[[Scene, int], Answered]
"""Answers a scene of which so many reused tokens are computed."""

Head = tuple[int, int]
"""Layer and head."""

_NOTHING = torch.empty(0, dtype=torch.int64)
CARRIED = (FROM_THE_FRONT.values, FROM_THE_FRONT.keys, FROM_BEHIND.values, FROM_BEHIND.keys)
"""Shares of the policy: see `carried`."""


def focus_scores(scene: Scene, paid: torch.Tensor | None = None) -> torch.Tensor:
    """Those of the policy before levelling: `[tokens]`. The last layer is not asked, as a pass does
    not run it."""
    paid = scene.paid if paid is None else paid
    return paid[len(paid) // 2 : -1].sum((0, 2)).prod(0).sqrt()


def levelled_scores(
    scene: Scene, scores: torch.Tensor | None = None, power: float = LEVELLING
) -> torch.Tensor:
    """Scores over the mean of their document to this power, its first tokens left out of it."""
    scores = (focus_scores(scene) if scores is None else scores).clone()
    for first, stop in scene.asked.documents:
        # A head alone may pay a document nothing at all.
        scores[first:stop] /= scores[first + BEGINNING : stop].mean().clamp(min=1e-9) ** power
    return scores


def _recomputed(
    scene: Scene, chosen: torch.Tensor, kv: KV | None = None, further: float = 0.0
) -> Answered:
    """The policy's way to recompute these: changes are carried."""
    return scene.answered(chosen, kv, further, carry_from(scene, chosen))


def _shift(scene: Scene, number: int) -> Answered:
    return scene.answered(_NOTHING)


def _focus(scene: Scene, number: int) -> Answered:
    return scene.answered(scene.best(focus_scores(scene), number))


def _default(scene: Scene, number: int) -> Answered:
    return _recomputed(scene, scene.best(levelled_scores(scene), number))


def _prophet(scene: Scene, number: int) -> Answered:
    scores = levelled_scores(scene, scene.paid[:, 0].sum((0, 1)))
    return _recomputed(scene, scene.best(scores, number))


def _norms(scene: Scene, number: int) -> Answered:
    """Attention times the norm of the value that it brings."""
    weighed = _times(scene.paid, scene.kv.values[:, :, : len(scene.asked.tokens)])
    scores = levelled_scores(scene, focus_scores(scene, weighed))
    return _recomputed(scene, scene.best(scores, number))


def _times(paid: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Attention `[layers, 2, heads, tokens]` times the norms of `[layers, KV heads, tokens, …]`."""
    norms = values.float().norm(dim=-1)
    return paid * norms.repeat_interleave(paid.shape[2] // norms.shape[1], 1)[:, None]


def of_layers(layers: tuple[int, ...]) -> Lead:
    """The attention of other layers than the second half."""

    def lead(scene: Scene, number: int) -> Answered:
        scores = levelled_scores(scene, scene.paid[list(layers)].sum((0, 2)).prod(0).sqrt())
        return _recomputed(scene, scene.best(scores, number))

    return lead


def of_heads(heads: tuple[Head, ...]) -> Lead:
    """The attention of some heads, in whatever layers (`heads.py`)."""

    def lead(scene: Scene, number: int) -> Answered:
        paid = torch.stack([scene.paid[layer, :, head] for layer, head in heads])
        scores = levelled_scores(scene, paid.sum(0).prod(0).sqrt())
        return _recomputed(scene, scene.best(scores, number))

    return lead


def _two_rounds(scene: Scene, number: int) -> Answered:
    """Half, and then what the question attends to once that half is recomputed."""
    first = scene.best(levelled_scores(scene), number // 2)
    kv = scene.kv.copy()
    paid = scene.read(kv, first, carry=carry_from(scene, first))
    scores = levelled_scores(scene, focus_scores(scene, paid))
    scores[first] = float("-inf")
    second = scene.best(scores, number - len(first))
    return scene.answered(second, kv, carry=carry_from(scene, second, there=first))


def _rollout(scene: Scene, number: int) -> Answered:
    """A third is computed to see what it attends to; it is computed once more beside as many of
    that (attention rollout, arXiv 2005.00928, of one step)."""
    first = scene.best(levelled_scores(scene), number // 3)
    paid = scene.read(scene.kv.copy(), first, probes=first, carry=carry_from(scene, first))
    return _recomputed(scene, _beside(scene, first, paid, number - len(first)))


def _beside(scene: Scene, first: torch.Tensor, paid: torch.Tensor, number: int) -> torch.Tensor:
    """These, and what most attention was paid to, together so many."""
    scores = paid[:, 0].sum((0, 1))
    scores[first] = float("-inf")
    beside = scene.best(scores, number - len(first))
    return torch.cat([first, beside]).sort().values


def _helpers(scene: Scene, number: int) -> Answered:
    """Half, and what that half attends to in full prefill, weighed by how far its values are off
    here: what recomputing it needs most."""
    first = scene.best(levelled_scores(scene), number // 2)
    paid = scene.read(scene.asked.exact.copy(), first, probes=first)
    stop = len(scene.asked.tokens)
    off = scene.asked.exact.values[:, :, :stop].float() - scene.kv.values[:, :, :stop].float()
    return _recomputed(scene, _beside(scene, first, _times(paid, off), number))


def _of_documents(scene: Scene, number: int) -> Answered:
    """All of it in the documents that got most attention: half of them."""
    scores, documents = focus_scores(scene), scene.asked.documents
    sums = torch.stack([scores[first:stop].sum() for first, stop in documents])
    kept = sums.argsort(descending=True)[: (len(documents) + 1) // 2]
    inside = torch.zeros_like(scene.is_document)
    for first, stop in (documents[i] for i in kept.tolist()):
        inside[first:stop] = True
    return _recomputed(scene, scene.best(levelled_scores(scene).masked_fill(~inside, -1), number))


def _each(scene: Scene, number: int) -> Answered:
    """Of each document its share."""
    scores, chosen = focus_scores(scene), []
    for first, stop in scene.asked.documents:
        its = round(number * (stop - first) / scene.num_reused)
        chosen.append(first + scores[first:stop].topk(its).indices)
    return _recomputed(scene, torch.cat(chosen).sort().values)


def _evenly(scene: Scene, number: int) -> Answered:
    """Every so manieth: what a choice is worth is the difference to this."""
    reused = scene.is_document.nonzero()[:, 0]
    return _recomputed(scene, reused[torch.linspace(0, len(reused) - 1, number).long().unique()])


def _beginnings(scene: Scene, number: int) -> Answered:
    """The first tokens of each document always."""
    scores = levelled_scores(scene)
    scores[_first_tokens(scene.asked.documents)] = float("inf")
    return _recomputed(scene, scene.best(scores, number))


def _hidden(scene: Scene, number: int) -> Answered:
    """Nobody attends to the first tokens of any document but the first."""
    kv = scene.kv.copy()
    kv.hidden = _first_tokens(scene.asked.documents[1:])
    scores = levelled_scores(scene)
    scores[kv.hidden] = -1
    return _recomputed(scene, scene.best(scores, number), kv)


def _first_tokens(documents: Sequence[tuple[int, int]]) -> torch.Tensor:
    return torch.cat([torch.arange(first, first + BEGINNING) for first, _ in documents])


def further(share: float) -> Lead:
    """Recomputed KV goes on beyond what was computed: of its way to full prefill's, recomputation
    among moved neighbours makes a part only."""

    def lead(scene: Scene, number: int) -> Answered:
        return _recomputed(scene, scene.best(levelled_scores(scene), number), further=share)

    return lead


def carried(*shares: Share | None) -> Lead:
    """Other shares in the change of the nearest token that is recomputed, in front and behind.

    Args:
        shares: of values and of keys by the one in front; of values and keys by the one behind.
    """

    def lead(scene: Scene, number: int) -> Answered:
        chosen = scene.best(levelled_scores(scene), number)
        four = [*shares, None, None, None][:4]
        return scene.answered(chosen, carry=carry_from(scene, chosen, four))

    return lead


def levelled(power: float) -> Lead:
    """Documents levelled by another power."""

    def lead(scene: Scene, number: int) -> Answered:
        return _recomputed(scene, scene.best(levelled_scores(scene, power=power), number))

    return lead


def carry_from(
    scene: Scene,
    chosen: torch.Tensor,
    shares: Sequence[Share | None] = CARRIED,
    there: torch.Tensor = _NOTHING,
) -> Carry:
    """Changes of these to all others, but to those that were recomputed before."""
    document = torch.zeros(len(scene.asked.tokens), dtype=torch.int64)
    for i, (first, stop) in enumerate(scene.asked.documents, 1):
        document[first:stop] = i
    others = scene.is_document.clone()
    others[chosen] = others[there] = False
    positions = others.nonzero()[:, 0]
    behind = torch.searchsorted(chosen, positions)
    sides = []
    for rows, values, keys in zip((behind - 1, behind), shares[::2], shares[1::2], strict=True):
        if not len(chosen) or values is None:
            continue
        nearest = chosen[rows.clamp(0, len(chosen) - 1)]
        within = (rows >= 0) & (rows < len(chosen))
        within &= document[nearest] == document[positions]
        distances = positions - nearest
        of_keys = None if keys is None else keys.at(distances.abs())
        rows = torch.where(within, rows, -1)
        sides.append(Side(rows, distances, values.at(distances.abs()), of_keys))
    return Carry(chosen, positions, sides)


def scaled(factor: float) -> Lead:
    """Moved keys times a factor: a temperature of the attention to them (arXiv 2502.05431)."""

    def lead(scene: Scene, number: int) -> Answered:
        chosen = scene.best(levelled_scores(scene), number)
        others = scene.is_document.clone()
        others[chosen] = False
        kv = scene.kv.copy()
        kv.keys[:, :, others.nonzero()[:, 0]] *= factor
        return _recomputed(scene, chosen, kv)

    return lead


def _exact(scene: Scene, number: int) -> Answered:
    """Full prefill's KV in place of what the policy would recompute; nothing is carried."""
    kv = scene.kv.copy()
    kv.take(scene.asked.exact, scene.best(levelled_scores(scene), number))
    return scene.answered(_NOTHING, kv)


def _foreseen(scene: Scene, number: int) -> Answered:
    """Chosen by the attention that the question pays in full prefill."""
    paid = scene.read(scene.asked.exact.copy(), _NOTHING)
    scores = levelled_scores(scene, focus_scores(scene, paid))
    return _recomputed(scene, scene.best(scores, number))


def _attributed(scene: Scene, number: int) -> Answered:
    """Chosen by what full prefill's KV of a token would be worth there (`attribution.py`)."""
    return _recomputed(scene, scene.best(attributions(scene), number))


def _smaller(scene: Scene, number: int) -> Answered:
    """Chosen by another model, which read the same prompt."""
    if scene.chooser is None:
        raise ValueError("no model chooses for this one: give one with --chooser DIR")
    return _recomputed(scene, scene.best(levelled_scores(scene.chooser), number))


@dataclass(frozen=True)
class Named:
    """A lead, and what it may compute.

    Attributes:
        name: as a table has it.
        lead: how.
        has_share: whether it depends on the share at all.
    """

    name: str
    lead: Lead
    has_share: bool = True


LEADS: Mapping[str, Lead] = MappingProxyType(
    {
        "shift": _shift,
        "default": _default,
        "focus": _focus,
        "prophet": _prophet,
        "norms": _norms,
        "two-rounds": _two_rounds,
        "rollout": _rollout,
        "helpers": _helpers,
        "documents": _of_documents,
        "each": _each,
        "evenly": _evenly,
        "beginnings": _beginnings,
        "hidden": _hidden,
        "exact": _exact,
        "foreseen": _foreseen,
        "attributed": _attributed,
        "smaller": _smaller,
    }
)
"""By name; beside them `layers=4+5+9`, `heads=4.0+9.3`, `levelled=.5`, `further=.25`, `keys=1.1`
and `carried=.25+.4+3`."""


def _share(text: str) -> Share:
    return Share(*map(float, text.split("+")))


def lead(text: str) -> Named:
    """The lead that a text names.

    Raises:
        ValueError: there is none; the text says what there is.
    """
    name, equals, value = text.partition("=")
    try:
        if not equals:
            return Named(text, LEADS[text], text != "shift")
        if name == "layers":
            return Named(text, of_layers(tuple(int(one) for one in value.split("+"))))
        if name == "heads":
            pairs = (tuple(map(int, one.split("."))) for one in value.split("+"))
            return Named(text, of_heads(tuple((layer, head) for layer, head in pairs)))
        if name == "carried":
            return Named(text, carried(*map(_share, value.split("/"))))
        made = {"further": further, "keys": scaled, "levelled": levelled}[name]
        return Named(text, made(float(value)))
    except (KeyError, TypeError, ValueError):
        raise ValueError(
            f"no lead {text!r}; there are {', '.join(LEADS)}, layers=N+N, "
            "heads=LAYER.HEAD+LAYER.HEAD, levelled=POWER, "
            "further=SHARE, keys=FACTOR and carried=COMMON+NEAR+REACH (of values, and behind a / "
            "of keys, by the token in front; then both by the one behind)"
        ) from None
