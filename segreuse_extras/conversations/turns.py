# SPDX-License-Identifier: Apache-2.0
"""How often prompts are continued by later ones, and how much of a prompt is then still cached.

A prompt that is computed in full has exact names: the later turns of its conversation find it in
vLLM's prefix cache, and compute none of it. A prompt that reuses moved text has none behind it, and
each later turn moves and recomputes again. So reuse that saves little now may cost more later. How
much later turns count is what this engine has seen: prompts that continue an earlier one, and what
of that prompt was still cached.

A prompt continues an earlier one if it begins with all of it. Where requests have a session id, a
prompt continues the last one of its session, and no other: an edit may have changed what it begins
with. So turns whose prefix an edit breaks count as later turns that find little.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

_ENDS = 1 << 14
"""Prompts whose ends are known, and sessions."""
_FEW = 8
"""Prompts and blocks that are thought to be without a later turn before any are seen."""
_REMEMBERED = 512
"""Prompts after which what was seen before counts half."""


class Turns:
    """Continued prompts of all namespaces; one per engine.

    Names of blocks are vLLM's chained hashes: a prompt that is continued in another namespace
    counts, too.
    """

    def __init__(self) -> None:
        self._exact: OrderedDict[bytes, int] = OrderedDict()  # by name of the last whole block
        self._sessions: OrderedDict[bytes, int] = OrderedDict()  # the same of their last prompts
        self._prompts = self._continued = 0.0
        self._exact_blocks = self._cached_blocks = 0.0

    @property
    def num_known(self) -> int:
        """Prompts whose ends are known, and sessions."""
        return len(self._exact) + len(self._sessions)

    @property
    def later(self) -> float:
        """Later turns that are expected to find a prompt that is computed in full.

        If a share p of all prompts is continued, a prompt has p + p^2 + ... later turns.
        """
        ends = self._prompts - self._continued + _FEW
        cached = self._cached_blocks / (self._exact_blocks + _FEW)
        return self._continued / ends * cached

    def began(
        self, names: Sequence[bytes], hit: int, exact: int, session: bytes | None = None
    ) -> None:
        """A request was admitted.

        Args:
            names: of the whole blocks of its prompt.
            hit: blocks of vLLM's prefix hit.
            exact: blocks of the prompt that have exact names from now on.
            session: what no other session has; None: nothing says which prompt it continues.
        """
        if not names:
            return
        if self._prompts >= _REMEMBERED:
            self._prompts /= 2
            self._continued /= 2
            self._exact_blocks /= 2
            self._cached_blocks /= 2
        self._prompts += 1
        was_exact = self._continues(names) if session is None else self._sessions.get(session)
        if was_exact is not None:
            self._continued += 1
            self._exact_blocks += was_exact
            self._cached_blocks += min(hit, was_exact)
        known, key = (self._exact, names[-1]) if session is None else (self._sessions, session)
        known[key] = min(exact, len(names))
        known.move_to_end(key)
        if len(known) > _ENDS:
            known.popitem(last=False)

    def _continues(self, names: Sequence[bytes]) -> int | None:
        """Exact blocks of the longest earlier prompt that this one begins with; None: there is
        none."""
        earlier = next((i for i in range(len(names) - 1, -1, -1) if names[i] in self._exact), None)
        return None if earlier is None else min(self._exact[names[earlier]], earlier + 1)
