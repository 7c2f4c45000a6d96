# SPDX-License-Identifier: Apache-2.0
"""`vllm-segreuse calibrate`: the cheapest setting that keeps a model's answers to your prompts.

The papers set the boundary layer by hand for each task. Here it is measured: each prompt is
computed in full and under every candidate setting, on segments that were computed in other
prompts; what is compared is the distribution of the answer's first token, and its first tokens.
"""
