# SPDX-License-Identifier: Apache-2.0
"""What a policy computes is compared with what vLLM would compute without it."""

import numpy as np
import pytest

from vllm_segreuse.cache.finder import ContentFinder
from vllm_segreuse.cache.index import SegmentIndex
from vllm_segreuse.options.request import PolicyOptions
from vllm_segreuse.plan import ModelLayers, Segments
from vllm_segreuse.scheduling.methods import Methods


@pytest.mark.parametrize("sharing", [0, 4])
def test_all_layers_that_write_kv_are_less_work_than_all_layers(sharing: int) -> None:
    """vLLM runs layers that share KV on every token, a pass on none."""
    layers = ModelLayers(4, (0, 1, 2), sharing)
    methods = Methods(16, layers, ContentFinder(SegmentIndex(1, 16), 0))
    options = PolicyOptions(policy="sparsex", dense_layers=4)
    reused = np.ones(64, np.bool_)
    segments = Segments.elsewhere(np.zeros(1, np.int32), np.full(1, 64, np.int32))
    recipe = methods.recipe(options, methods.work_of(options), reused, segments)
    assert (recipe is not None) == bool(sharing)
