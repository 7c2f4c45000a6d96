# SPDX-License-Identifier: Apache-2.0
"""Codecs of the second tier: how fast they are, and what they cost in quality."""
