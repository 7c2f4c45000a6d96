# SPDX-License-Identifier: Apache-2.0
"""What passes have to do, token by token, in float64: loops over the equations of the papers.

Nothing here calls what it is compared with; `TinyDecoder` has the weights of `tiny.World` only.
"""

import math

import numpy as np

from tests.prefill.tiny import CHANNELS, HEADS, KV_HEADS, LAYERS, SCALE, World
from vllm_segreuse.plan import Boundary, Deviation, Gather, Probed, ReusePlan
from vllm_segreuse.prefill.carried import FROM_BEHIND, FROM_THE_FRONT

KV = dict[tuple[int, int], tuple[np.ndarray, np.ndarray]]
"""(layer, position) -> keys and values, each `[KV_HEADS, CHANNELS]`."""
States = dict[int, np.ndarray]
"""Position -> what flows between the layers."""
Carried = dict[int, list[tuple[int, tuple[float, ...]]]]
NONE: Carried = {}


def norm(x: np.ndarray) -> np.ndarray:
    return x / np.sqrt(np.mean(x**2))


def softmax(logits: np.ndarray) -> np.ndarray:
    shifted = np.exp(logits - logits.max())
    return shifted / shifted.sum()


def kv_head(head: int) -> int:
    """Which key and value a query's head goes by: neighbours share one."""
    return head // (HEADS // KV_HEADS)


class TinyDecoder:
    """The decoder of a `tiny.World`, for one token at a time."""

    def __init__(self, world: World) -> None:
        self.weights = {k: v.double().numpy() for k, v in world.model.state_dict().items()}
        self.windows = [kind.window for kind in world.kinds]
        self.global_layers = [layer for layer in range(LAYERS - 1) if not self.windows[layer]]

    def embed(self, token: int, position: int) -> np.ndarray:
        return self.weights["tokens.weight"][token] + self.weights["positions.weight"][position]

    def projected(self, layer: int, name: str, x: np.ndarray) -> np.ndarray:
        return self.weights[f"layers.{layer}.{name}.weight"] @ x

    def query(self, layer: int, state: np.ndarray) -> np.ndarray:
        return self.projected(layer, "query", norm(state)).reshape(HEADS, CHANNELS)

    def key_and_value(self, layer: int, state: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        key, value = (self.projected(layer, name, norm(state)) for name in ("key", "value"))
        return key.reshape(KV_HEADS, CHANNELS), value.reshape(KV_HEADS, CHANNELS)

    def shares(self, layer: int, position: int, query: np.ndarray, kv: KV) -> np.ndarray:
        """Equation 1 of SparseX: how each head divides its attention, `[HEADS, keys before]`."""
        found = np.zeros((HEADS, position + 1))
        window = self.windows[layer]
        for head in range(HEADS):
            # Itself and everything before it, or the last of these.
            seen = range(max(0, position + 1 - window) if window else 0, position + 1)
            keys = np.array([kv[layer, j][0][kv_head(head)] for j in seen])
            found[head, seen] = softmax(keys @ query[head] * SCALE)
        return found

    def run(self, layers: range, states: States, kv: KV, carried: Carried = NONE) -> States:
        """Layers on some tokens: all write their keys and values, and then each attends.

        Args:
            carried: by token, others and the shares of the changes of their keys and values that it
                takes part in, at each layer but the model's last.
        """
        for layer in layers:
            held = dict(kv)
            for position, state in states.items():
                kv[layer, position] = self.key_and_value(layer, state)
            for position, sides in carried.items() if layer < LAYERS - 1 else ():
                mine = held[layer, position]
                for other, shares in sides:
                    new, old = kv[layer, other], held[layer, other]
                    key, value = (
                        mine[part] + share * (new[part] - old[part])
                        for part, share in enumerate(shares)
                    )
                    mine = key, value
                kv[layer, position] = mine
            behind = {}
            for position, state in states.items():
                attended = np.zeros((HEADS, CHANNELS))
                shares = self.shares(layer, position, self.query(layer, state), kv)
                for head in range(HEADS):
                    for j in range(position + 1):
                        attended[head] += shares[head, j] * kv[layer, j][1][kv_head(head)]
                state = state + self.projected(layer, "output", attended.reshape(-1))
                behind[position] = state + np.tanh(self.projected(layer, "mlp", norm(state)))
            states = behind
        return states


def carry_out(decoder: TinyDecoder, plan: ReusePlan, kv: KV) -> tuple[list[int], KV]:
    """What a plan asks for.

    Args:
        kv: of every position, with the reused keys and values in place.

    Returns:
        Positions that are computed behind the dense layers, and the KV that this leaves; of the
        suffix, neither.
    """
    recipe = plan.recipe
    program = recipe.program
    token_ids = dict(enumerate(plan.token_ids.tolist(), plan.start))
    always = {plan.start + int(i) for i in np.flatnonzero(recipe.always)}
    probes = {plan.start + int(i) for i in np.flatnonzero(recipe.probes)}
    suffix = dict(enumerate(plan.suffix.tolist(), plan.stop))  # asked like any new token
    token_ids |= suffix
    always |= suffix.keys()
    probes |= suffix.keys()
    # What is computed has no keys and values before it is.
    kv = {at: held for at, held in kv.items() if at[1] not in always}
    embedded = {p: decoder.embed(token, p) for p, token in token_ids.items()}

    dense = program.dense_layers
    states = decoder.run(range(dense), embedded, kv)
    scores = dict.fromkeys(token_ids, 0.0)
    least = 0.0
    match program:
        case Boundary():
            _attention_at_boundary(decoder, dense, probes, always, embedded, kv, scores)
        case Deviation():
            for p in set(states) - always:
                for new, held in zip(
                    decoder.key_and_value(dense, states[p]), kv[dense, p], strict=True
                ):
                    scores[p] += float(((new - held) ** 2).sum())
        case Probed():
            least = program.threshold
            first = {p: embedded[p] for p in sorted(always)}
            _attention_at_all_layers(decoder, program, probes, first, kv, scores)
            decoder.run(range(LAYERS), first, kv)
    others = sorted(set(token_ids) - always, key=lambda p: (-scores[p], p))
    if isinstance(program, Probed) and program.levelling:
        for run in _runs(plan, set(others)):
            mean = np.mean([scores[p] for p in (run[4:] or run)])
            scores |= {p: scores[p] / mean**program.levelling for p in run}
        others.sort(key=lambda p: (-scores[p], p))
    chosen = [p for p in others[: recipe.top_k] if scores[p] >= least]
    active = sorted((always | set(chosen)) - suffix.keys())
    again = set(active) - (always - probes if isinstance(program, Probed) else set())
    carried = NONE
    if isinstance(program, Probed) and program.carries:
        carried = _carried(plan, set(others), again)
    decoder.run(range(dense, LAYERS), {p: states[p] for p in sorted(again)}, kv, carried)
    return active, {at: held for at, held in kv.items() if at[1] not in suffix}


def _carried(plan: ReusePlan, others: set[int], again: set[int]) -> Carried:
    """Tokens that may be chosen, and are not: the nearest ones that are computed again, on either
    side, of those that were read in the same sequence without a gap."""
    found: Carried = {}
    for run in _runs(plan, others):
        for p in set(run) - again:
            in_front = [i for i in run if i < p and i in again]
            behind = [i for i in run if i > p and i in again]
            found[p] = []
            for nearest, shares in ((in_front[-1:], FROM_THE_FRONT), (behind[:1], FROM_BEHIND)):
                for i in nearest:
                    of_parts = (
                        share.common + share.near * math.exp(-abs(i - p) / share.reach)
                        for share in shares
                    )
                    found[p].append((i, tuple(of_parts)))
    return found


def _runs(plan: ReusePlan, others: set[int]) -> list[list[int]]:
    """Tokens that may be chosen, by what was read in the same sequence without a gap."""
    moved_by = {
        first + i: first - position
        for first, length, _, _, position in plan.pieces.rows()
        for i in range(length)
    }
    runs: list[list[int]] = []
    for p in sorted(others):
        if not (runs and runs[-1][-1] == p - 1 and moved_by.get(p) == moved_by.get(p - 1)):
            runs.append([])
        runs[-1].append(p)
    return runs


def carry_out_in_stages(
    decoder: TinyDecoder, plan: ReusePlan, kv: KV, entering: dict[int, tuple[int, np.ndarray]]
) -> KV:
    """The same for tokens that enter between layers.

    Args:
        kv: of every position, with the donors' keys and values in place.
        entering: by position, the layer at which a token enters, and with what.
    """
    token_ids = dict(enumerate(plan.token_ids.tolist(), plan.start))
    always = [plan.start + int(i) for i in np.flatnonzero(plan.recipe.always)]
    kv = {at: held for at, held in kv.items() if at[1] not in always}
    states = {p: decoder.embed(token_ids[p], p) for p in always}
    for layer in range(LAYERS):
        states |= {p: stream for p, (cut, stream) in entering.items() if cut == layer}
        states = decoder.run(range(layer, layer + 1), dict(sorted(states.items())), kv)
    return kv


def _attention_at_boundary(
    decoder: TinyDecoder,
    dense: int,
    probes: set[int],
    always: set[int],
    embedded: States,
    kv: KV,
    scores: dict[int, float],
) -> None:
    """SparseX: the queries of the boundary layer, which is the last dense one, or the first; where
    that sees a window only, the next that does not, and if there is none, the last before it."""
    first = max(dense - 1, 0)
    behind = [layer for layer in decoder.global_layers if layer >= first]
    boundary = behind[0] if behind else decoder.global_layers[-1]
    kv, before = dict(kv), embedded
    if boundary >= dense:  # from there on, only for what is always computed
        dense_states = decoder.run(range(dense), embedded, kv)
        before = decoder.run(range(dense, boundary), {p: dense_states[p] for p in always}, kv)
    else:
        before = decoder.run(range(boundary), embedded, kv)
    for p, state in before.items():
        kv[boundary, p] = decoder.key_and_value(boundary, state)
    for p in probes:
        shares = decoder.shares(boundary, p, decoder.query(boundary, before[p]), kv)
        for j in range(p + 1):
            if j in scores:  # equation 2; those behind the prefix hit
                scores[j] += shares[:, j].sum()


def _attention_at_all_layers(
    decoder: TinyDecoder,
    program: Probed,
    probes: set[int],
    states: States,
    kv: KV,
    scores: dict[int, float],
) -> None:
    """ProphetKV: the question, and what else is new, against the reused KV, at all layers but the
    last."""
    kv = dict(kv)
    gather, by_last = program.gather, dict.fromkeys(scores, 0.0)
    counting = [layer for layer in decoder.global_layers if layer >= program.first_layer]
    counting = counting or decoder.global_layers[-1:]
    for layer in range(LAYERS - 1):
        asking = {p: decoder.query(layer, states[p]) for p in sorted(probes)}
        states = decoder.run(range(layer, layer + 1), states, kv)
        for p, query in asking.items():
            shares = decoder.shares(layer, p, query, kv)
            for j in range(p + 1):
                if j not in scores or layer not in counting:
                    continue
                if gather is Gather.MAX:
                    scores[j] = max(scores[j], shares[:, j].max())
                    continue
                scores[j] += shares[:, j].sum()
                if p in sorted(probes)[-4:]:
                    by_last[j] += shares[:, j].sum()
    if gather is Gather.SUM_AND_LAST:
        for j in scores:
            scores[j] = math.sqrt(scores[j] * by_last[j])
