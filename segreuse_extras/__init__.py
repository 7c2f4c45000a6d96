# SPDX-License-Identifier: Apache-2.0
"""Features that plain reuse does without, in folders as those of `vllm_segreuse/features/`.

    trained                     models that were trained to see documents computed alone
    compressed                  documents that requests name, of which a share of the tokens is
                                kept, or for which anchors stand
    images                      images in prompts, which are reused as a whole
    conversations, healing      what an earlier turn has moved: kept as it is, or computed anew
    coalescing                  equal prompts at once
    states                      layers that hand a state on, which is composed
    pipeline                    layers divided among pipeline stages
    transfer                    prefill on one engine, decoding on another
    audit                       answers compared with those of full prefill, while serving
    similar                     segments that are similar, but not equal
    context                     KV that carries nothing of what is not in the prompt
    explain, tracing, viewer    where reuse comes from: in reports, in traces, on pages

`vllm_segreuse.features.FEATURES` names them. They import `vllm_segreuse`, which never imports them
otherwise.
"""
