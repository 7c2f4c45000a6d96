# SPDX-License-Identifier: Apache-2.0
"""Codecs of the second tier: how fast they are, and what they cost in quality."""

USUAL = ("needles", "one-hop", "pronoun", "contracts", "chat")
"""Tasks of `bench english` by which quality is measured."""
