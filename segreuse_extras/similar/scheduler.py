# SPDX-License-Identifier: Apache-2.0
"""Similar segments: who searches for them, and their index, which follows what requests leave."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from segreuse_extras.similar.options import SimilarityOptions, SimilarRequest, SimilarServer
from segreuse_extras.similar.start import similar_segments
from vllm_segreuse.cache.finder import Finder
from vllm_segreuse.cache.images import PromptImages
from vllm_segreuse.options.request import PolicyOptions
from vllm_segreuse.policies import WITHOUT_CHOICE
from vllm_segreuse.scheduling.core import Core
from vllm_segreuse.scheduling.feature import Ending, Feature
from vllm_segreuse.scheduling.making import Making

if TYPE_CHECKING:
    from segreuse_extras.similar.finder import SimilarFinder


class SimilarSegments(Feature):
    """Of one engine.

    Args:
        core: of the engine.
        similar: finds similar segments, beside equal ones; None: the server has not the option.

    Attributes:
        similar: as above, under the options that are in force.
    """

    name = "similar"

    def __init__(self, core: Core, similar: SimilarFinder | None) -> None:
        self._health = core.health
        self._of_server = SimilarServer.of(core.config).similarity
        self.similar = similar
        self.followers = () if similar is None else (similar.store,)
        self.calls = {"set_similarity": self.set_options}

    def finder(self, options: PolicyOptions, images: PromptImages | None, inner: Finder) -> Finder:
        """A request that asks for similar segments, is text, and may have what is not exact."""
        if self.similar is None or images is not None or options.policy == "exact":
            return inner
        if not SimilarRequest.of(options).similarity:
            return inner
        takes_cuts = options.policy in WITHOUT_CHOICE
        return self.similar if takes_cuts else self.similar.without_cuts()

    def finished(self, ending: Ending) -> None:
        """Index what was cached since."""
        if ending.tracked is not None and self.similar is not None:
            with self._health.contained("the similarity index"):
                self.similar.store.catch_up()

    def set_options(self, options: Mapping[str, Any]) -> None:
        """Search under other options of `similarity` from the next request on: what
        `vllm-segreuse calibrate --similarity` compares.

        Args:
            options: laid over the server's.

        Raises:
            ValueError: the server has no `similarity`, or one that these cannot be tried with.
        """
        of_server = self._of_server
        if self.similar is None or of_server is None:
            raise ValueError("the server has no option `similarity`")
        wanted = SimilarityOptions.model_validate({**of_server.model_dump(), **options})
        if not set(wanted.cuts) <= set(of_server.cuts):
            raise ValueError(f"w_exact={wanted.w_exact} has other layers than {of_server.cuts}")
        self.similar = self.similar.under(wanted)


def start(making: Making) -> SimilarSegments:
    """That of an engine."""
    core = making.core
    similar = similar_segments(
        core.vllm_config.model_config,
        core.config,
        core.index,
        core.namespaces,
        making.by_content,
        core.stats,
    )
    return SimilarSegments(core, similar)
