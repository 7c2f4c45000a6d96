# SPDX-License-Identifier: Apache-2.0
"""What a model that was trained on documents computed alone rules out, refused at start."""

from __future__ import annotations

from typing import TYPE_CHECKING

from segreuse_extras.audit.options import AuditServer
from segreuse_extras.similar.options import SimilarServer
from segreuse_extras.trained.folder import layout_of
from segreuse_extras.trained.layout import LayoutError
from vllm_segreuse.engine.supported import RefusedError
from vllm_segreuse.features.knowledge.compression import compressor
from vllm_segreuse.features.tier.options import TierServer
from vllm_segreuse.options.server import ServerOptions

if TYPE_CHECKING:
    from vllm.config import VllmConfig

POLICY = "link"
"""What reports call it. It is no choice: such a model has no other."""


def check(vllm_config: VllmConfig, config: ServerOptions) -> None:
    """Refuse a model that was trained so and cannot be served.

    Raises:
        RefusedError: the folder contradicts itself, or an option contradicts the model.
    """
    try:
        layout = layout_of(vllm_config.model_config)
    except LayoutError as error:
        raise RefusedError(str(error)) from None
    if layout is not None:
        check_options(config)
        if layout.anchors is not None and compressor() is None:
            raise RefusedError(
                "anchors stand for documents of this model (segreuse in its config.json), and no "
                "feature of this server keeps them: list segreuse_extras.compressed in "
                "vllm_segreuse.features.FEATURES"
            )


def check_options(config: ServerOptions) -> None:
    """Refuse options that contradict a model with a layout.

    Raises:
        RefusedError: names the first of them.
    """
    tier = TierServer.of(config).tier
    faults = {
        "policy": "policy" in config.model_fields_set,
        "similarity": SimilarServer.of(config).similarity is not None,
        "audit.share": AuditServer.of(config).audit.share > 0,
        # What was rounded is never restored, and nothing else of such a model comes from a record.
        "tier.codec": tier is not None and tier.codec != "raw",
    }
    if wrong := [name for name, is_wrong in faults.items() if is_wrong]:
        raise RefusedError(
            f"{wrong[0]} cannot be combined with a model that was trained on documents computed "
            "alone (segreuse.isolated_documents in its config.json): remove it"
        )
