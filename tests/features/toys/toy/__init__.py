# SPDX-License-Identifier: Apache-2.0
"""Greets requests: a feature with everything that one may have."""
