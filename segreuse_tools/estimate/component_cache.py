# SPDX-License-Identifier: Apache-2.0
"""What caches of whole components know: the bound of what any engine could reuse.

A component is known as a whole or not at all, and each is held once, wherever it stands. The least
recently used tokens are evicted. Three ways of looking one up:

- as a prefix: it and all in front of it have been there;
- as a prefix of the prompt whose passages are reordered, so that it begins like an earlier one;
- at any position.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator

from segreuse_tools.estimate.traces.request import Kind, PromptPart


class Lru:
    """Keys, and the tokens that each takes.

    Args:
        capacity: tokens.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.used = 0
        self._tokens: OrderedDict[Hashable, int] = OrderedDict()

    def __contains__(self, key: Hashable) -> bool:
        return key in self._tokens

    def use(self, keys: Iterable[tuple[Hashable, int]]) -> None:
        """These were used, the last of them last; what there is no room for goes."""
        for key, tokens in keys:
            if key in self._tokens:
                self._tokens.move_to_end(key)
            else:
                self._tokens[key] = tokens
                self.used += tokens
        while self.used > self.capacity:
            self.used -= self._tokens.popitem(last=False)[1]


class ComponentCache:
    """One cache of each kind.

    Args:
        capacity: tokens that each holds.
    """

    def __init__(self, capacity: int) -> None:
        self._prefixes = Lru(capacity)
        self._reordered = Lru(capacity)
        self._anywhere = Lru(capacity)

    def run(self, parts: tuple[PromptPart, ...]) -> tuple[int, int, list[bool]]:
        """Tokens of a prompt that are known as a prefix, and as one with passages reordered; and
        which parts are known at any position. All are held from then on."""
        prefix = _run_prefix(self._prefixes, parts)
        if any(part.kind is Kind.PASSAGE for part in parts):
            reordered = _run_prefix(self._reordered, [*_reordered(self._reordered, parts)])
        else:
            reordered = _run_prefix(self._reordered, parts)
        known = [part.id in self._anywhere for part in parts]
        self._anywhere.use((part.id, part.tokens) for part in parts)
        return prefix, reordered, known


def _run_prefix(cache: Lru, parts: Iterable[PromptPart]) -> int:
    path, known, is_known, name = [], 0, True, 0
    for part in parts:
        name = name_behind(name, part)
        path.append((name, part.tokens))
        is_known = is_known and name in cache
        known += part.tokens if is_known else 0
    # As vLLM does: of one prompt, the end goes first.
    cache.use(reversed(path))
    return known


def name_behind(name: int, part: PromptPart) -> int:
    """Name of a part and of all in front of it, which `name` stands for; 0: nothing is."""
    return hash((name, part.id))


def _reordered(cache: Lru, parts: tuple[PromptPart, ...]) -> Iterator[PromptPart]:
    """The prompt, with the passages behind each other in the order that continues a known prefix;
    those that continue none, in the order of their ids, so that they are alike from now on."""
    name = 0
    left = [part for part in parts if part.kind is Kind.PASSAGE]
    for part in parts:
        if part.kind is Kind.PASSAGE:
            if not left:
                continue
            following, left = left, []
            while following:
                known = (it for it in following if name_behind(name, it) in cache)
                chosen = next(known, None) or min(following)
                following.remove(chosen)
                name = name_behind(name, chosen)
                yield chosen
        else:
            name = name_behind(name, part)
            yield part
