# SPDX-License-Identifier: Apache-2.0
"""Audits: some of the requests that reuse are also computed in full, and compared.

    a request reuses     the scheduler's side draws it (`draw.py`); the workers keep the logits of
                         its first token, and the most likely tokens behind it (`recorder.py`)
    it has ended         a *reference* waits until the engine is idle enough: the same prompt,
                         without extra keys, made to say the same answer
    the reference runs   the workers compare, and report divergence and agreement (`audits.py`)
    afterwards           metrics, the log (`log.py`), the record of the namespace (`drifting.py`)

Both are requests of one engine, whose scheduler adds the reference itself: API servers ignore what
they have not sent, so that no answer, and none of vLLM's figures of requests, is changed by it.
"""
