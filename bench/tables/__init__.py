# SPDX-License-Identifier: Apache-2.0
"""Figures in the pages, written from the results of measurements: `python -m bench tables`."""
