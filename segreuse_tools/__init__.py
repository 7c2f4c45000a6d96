# SPDX-License-Identifier: Apache-2.0
"""What runs beside a server: the command `vllm-segreuse`, and clients of a running server.

    cli          the command, which hands its arguments on to one of `commands/`
    doctor       whether a model will be served with segment reuse here
    estimate     what a request log would have reused
    calibrate    the cheapest setting that keeps a model's answers
    explain      what a server would reuse of a request
    knowledge    the client of a server's knowledge bases, and the files that it adds

These modules import `vllm_segreuse`, and nothing there imports them.
"""
