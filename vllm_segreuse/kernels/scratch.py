# SPDX-License-Identifier: Apache-2.0
"""How much device memory a GPU's `align` stages overlapping moves in."""

SCRATCH_BYTES = 256 << 20
"""Most bytes of it; a single layer that needs more gets them."""


def layers_at_once(num_layers: int, layer_bytes: int) -> int:
    """Layers that are staged together; the others take turns.

    Args:
        num_layers: of the call.
        layer_bytes: staged of each.
    """
    return min(num_layers, max(1, SCRATCH_BYTES // layer_bytes))
