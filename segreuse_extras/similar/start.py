# SPDX-License-Identifier: Apache-2.0
"""The similarity index of an engine, if its options ask for one, with its tokenizer's texts."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from vllm.logger import init_logger
from vllm.tokenizers import TokenizerLike, cached_tokenizer_from_config
from vllm.tokenizers.detokenizer_utils import convert_ids_list_to_tokens

from segreuse_extras.similar.options import SimilarityOptions, SimilarServer
from vllm_segreuse.cache.finder import Finder
from vllm_segreuse.cache.index import SegmentIndex
from vllm_segreuse.cache.namespace import NamespaceTable
from vllm_segreuse.engine.metrics import Counted
from vllm_segreuse.options.server import ServerOptions

if TYPE_CHECKING:
    from vllm.config import ModelConfig

    from segreuse_extras.similar.canonical import Vocabulary
    from segreuse_extras.similar.finder import SimilarFinder

logger = init_logger("vllm.segreuse")

_NO_CHARACTER = "\ufffd"  # of a token that is a part of one


def similar_segments(
    model_config: ModelConfig,
    config: ServerOptions,
    index: SegmentIndex,
    namespaces: NamespaceTable,
    equal: Finder,
    stats: Counted,
) -> SimilarFinder | None:
    """A finder of similar segments; None where no request may ask for them.

    Args:
        model_config: vLLM's, which names the tokenizer.
        config: the server's options.
        index: what donates.
        namespaces: of the ids in the index.
        equal: searches first.
        stats: counts the time of searches.
    """
    options = SimilarServer.of(config).similarity
    if options is None:
        return None
    # Imported here: datasketch loads scipy, which nobody else in this process needs.
    from segreuse_extras.similar.finder import SimilarFinder, warm_up
    from segreuse_extras.similar.store import SimilarStore

    warm_up(options)
    return SimilarFinder(
        equal,
        SimilarStore(index, namespaces, vocabulary(model_config, options), options),
        index,
        config.max_provenance_depth,
        clock=time.perf_counter,
        on_search=partial(stats.observe, "similar_seconds"),
    )


def vocabulary(model_config: ModelConfig, options: SimilarityOptions) -> Vocabulary:
    """What a model's tokens are compared by; without its tokenizer, each token by itself."""
    from segreuse_extras.similar.canonical import Vocabulary

    try:
        tokenizer = cached_tokenizer_from_config(model_config)
    except Exception:
        logger.exception("segment reuse: the tokenizer cannot be loaded")
        tokenizer = None
    if tokenizer is None:
        logger.warning(
            "segment reuse: there is no tokenizer (skip_tokenizer_init), so similar segments are "
            "compared token by token: numbers, case and white space count, and there are no anchors"
        )
        return Vocabulary.of_identity()
    found = Vocabulary.of_texts(_texts(tokenizer), options.volatile)
    return found.with_anchors(
        [tokenizer.encode(anchor, add_special_tokens=False) for anchor in options.anchors]
    )


def _texts(tokenizer: TokenizerLike) -> Sequence[str]:
    texts = convert_ids_list_to_tokens(tokenizer, list(range(len(tokenizer))))
    return ["" if _NO_CHARACTER in text else text for text in texts]
