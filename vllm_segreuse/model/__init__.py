# SPDX-License-Identifier: Apache-2.0
"""The loaded model, as segment reuse sees it: layers, the layout of their pages, rotations."""
