# SPDX-License-Identifier: Apache-2.0
"""Types of the arrays that plans consist of."""

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int32]
BoolArray = npt.NDArray[np.bool_]
FloatArray = npt.NDArray[np.float64]

Fates = npt.NDArray[np.int8]
"""A `Fate` of each token (`recipe.py`)."""


def count(mask: BoolArray) -> int:
    """How many entries are true."""
    return int(np.count_nonzero(mask))
