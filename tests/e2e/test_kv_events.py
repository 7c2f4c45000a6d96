# SPDX-License-Identifier: Apache-2.0
"""Nobody who listens to vLLM's KV events hears of approximate blocks."""

from tests.e2e.engine import BLOCK_SIZE, NAMESPACE, Prompts, engine

SHIFT = NAMESPACE | {"segreuse_policy": "shift", "segreuse_min_reused_tokens": 16}


def test_29_kv_events_show_exact_blocks_only() -> None:
    from vllm.config import KVEventsConfig
    from vllm.distributed.kv_events import AllBlocksCleared, BlockStored

    events = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    with engine("qwen3", kv_events_config=events) as reusing:
        published = []
        reusing.scheduler.kv_event_publisher.publish = published.append
        text = Prompts(reusing.vocab_size, seed=9)
        document = text.tokens(256)
        reusing.ask(document, options=NAMESPACE, max_tokens=1)
        prompt = text.around(document)
        reusing.ask(prompt, options=SHIFT, max_tokens=2 * BLOCK_SIZE, ignore_eos=True)
        reusing.reset()
        reusing.ask(document)
        seen = [event for batch in published for event in batch.events]
        stored = [e.token_ids for e in seen if isinstance(e, BlockStored)]
        assert stored == [document, document]
        assert all(isinstance(e, BlockStored | AllBlocksCleared) for e in seen)
