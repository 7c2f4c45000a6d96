# SPDX-License-Identifier: Apache-2.0
"""KV of the draft, of the tokens that a pass has computed; that of the others is moved with theirs.

A wrong draft costs acceptance only, never an answer: the target verifies each token. Two of its
tokens are approximate where nothing else is: the last one of a reused segment, which was drafted
from in front of another token, and of MTP the first one of a prompt, whose input is masked.
"""

from __future__ import annotations

import torch

from vllm_segreuse.model.drafts import Draft
from vllm_segreuse.model.fast_ops import FastOps
from vllm_segreuse.model.layer_state import LayerState
from vllm_segreuse.prefill.attention import PassAttention
from vllm_segreuse.prefill.batch import Batch
from vllm_segreuse.prefill.chunks import Chunks
from vllm_segreuse.prefill.tokens import Index


class DraftRunner:
    """Runs a draft on tokens of a batch, chunk by chunk.

    Args:
        draft: as loaded.
        attention: of its layers.
        max_chunk_tokens: most tokens computed at once.
    """

    def __init__(self, draft: Draft, attention: PassAttention, max_chunk_tokens: int) -> None:
        self.draft = draft
        self._attention = attention
        self._fast_ops = FastOps(draft.model)
        self._max_chunk_tokens = max_chunk_tokens

    def run(self, batch: Batch, active: torch.Tensor, state: LayerState | None) -> Chunks[None]:
        """The draft's KV of these tokens.

        Args:
            batch: the plans.
            active: flat indices of the tokens that all layers were run on, in any order. Which of
                them are drafted from is read from the device: it is waited for.
            state: what the model returned of them, if the draft takes that.
        """
        order = active.argsort()
        active, token_ids = active[order], batch.tokens.token_ids
        known = batch.tokens.positions[active] < self.draft.max_positions
        if self.draft.takes_states:
            token_ids = batch.following()
            known &= token_ids[active] >= 0
        order, active = order[known], active[known]
        if not len(active):
            return
        tokens, token_ids = batch.tokens.take(Index.computed(active)), token_ids[active]
        layers = len(self.draft.attention)
        for part, chunk in tokens.parts(batch.chunk_tokens(self._max_chunk_tokens, layers)):
            states = self._states(batch, active[part], order[part], state)
            with (
                self._attention.forward_context(chunk, batch.block_tables),
                self._fast_ops.preferred(),
            ):
                self.draft.compute(token_ids[part], chunk.positions, states)
            yield len(chunk) * layers

    def _states(
        self, batch: Batch, active: torch.Tensor, rows: torch.Tensor, state: LayerState | None
    ) -> torch.Tensor | None:
        """What the draft is handed of these tokens, which stand in such rows of the state."""
        if not self.draft.takes_states:
            return None
        if self.draft.auxiliary_layers:
            auxiliary = [batch.auxiliary[layer][active] for layer in self.draft.auxiliary_layers]
            return self.draft.combined(torch.cat(auxiliary, -1))
        assert state is not None
        return self.draft.combined(state.hidden_states[rows])
