# SPDX-License-Identifier: Apache-2.0
"""Where the Triton kernels run in tests: on a CUDA GPU, or in Triton's interpreter on the CPU.

The interpreter is chosen by `TRITON_INTERPRET=1` when triton is imported, for the whole process.
`test_triton_interpreter.py` starts one for the tests that need it.
"""

import os
from typing import Any

import pytest
import torch

INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETING or not torch.cuda.is_available() else "cuda"


def require_triton() -> None:
    """Skip a module of tests whose kernels cannot run in this process; call before importing them.

    Skips where triton is missing, and where there is neither a GPU nor the interpreter.
    """
    pytest.importorskip("triton", reason="triton is not installed")
    if INTERPRETING:
        _repair_interpreter()
    elif DEVICE == "cpu":
        pytest.skip(
            "needs a CUDA GPU or TRITON_INTERPRET=1; test_triton_interpreter.py runs it so",
            allow_module_level=True,
        )


def _repair_interpreter() -> None:
    """Make bfloat16 right: Triton 3.9 interprets its bits as integers in `dot`, and cuts them off
    where GPUs round to nearest."""
    import numpy as np
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    builder: Any = InterpreterBuilder
    cast, dot = builder.cast_impl, builder.create_dot

    def rounding_cast(self: Any, source: Any, target: Any) -> Any:
        if source.dtype.scalar == tl.float32 and target.scalar == tl.bfloat16:
            rounded = torch.from_numpy(np.array(source.data, np.float32)).to(torch.bfloat16)
            bits = rounded.view(torch.int16).numpy().view(np.uint16)
            return TensorHandle(bits, tl.bfloat16)
        return cast(self, source, target)

    def widening_dot(self: Any, a: Any, b: Any, *others: Any) -> Any:
        if a.dtype.scalar == tl.bfloat16:
            a, b = (cast(self, x, tl.float32) for x in (a, b))
        return dot(self, a, b, *others)

    builder.cast_impl, builder.create_dot = rounding_cast, widening_dot
