# SPDX-License-Identifier: Apache-2.0
"""Property tests run on busy machines and compile on first use: no deadline per example."""

from hypothesis import settings

settings.register_profile("segreuse", deadline=None, max_examples=150)
settings.load_profile("segreuse")
