# SPDX-License-Identifier: Apache-2.0
"""Conversations with moved text are computed in full while the engine is idle."""
