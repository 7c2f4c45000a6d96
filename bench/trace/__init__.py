# SPDX-License-Identifier: Apache-2.0
"""A trace of ids through the real engine, beside what `vllm-segreuse estimate` says of it.

slices       which requests, and the token ids that stand for their parts
serving      the arms, each a server, and what one request after the other finds there
estimating   the same by simulation
figures      rows and the summary
command      `python -m bench trace`
"""
