# SPDX-License-Identifier: Apache-2.0
"""What transformers and vLLM import of torchvision to serve Qwen's vision models.

The real one, built for GPUs, breaks torch's CPU build (CONTRIBUTING.md). Test engines of these
models find this one on their path; images are resized by torch.
"""

from torchvision import io, transforms

__all__ = ["io", "transforms"]
__version__ = "0.0"
