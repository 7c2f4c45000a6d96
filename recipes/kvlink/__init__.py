# SPDX-License-Identifier: Apache-2.0
"""A model is trained on documents computed alone, with link tokens behind them (KVLink)."""
