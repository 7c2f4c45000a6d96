# SPDX-License-Identifier: Apache-2.0
"""Types of the arrays that plans consist of."""

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int32]
BoolArray = npt.NDArray[np.bool_]
