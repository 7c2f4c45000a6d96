# SPDX-License-Identifier: Apache-2.0
"""Metrics of greetings."""

from prometheus_client import Counter

from vllm_segreuse.engine.metrics import Metric

METRICS = (Metric("toy_greetings_total", Counter, "Requests that were greeted."),)
