"""Who may speak to this stage, and the streams to those it works with. Knows nothing of what frames mean.

fence          who may speak for each partner, and who no longer may
suspicion      an owner that does not answer: have others look at it
partner        one partner: the stream to it, the stream from it, its owner as we know it
partners       all of them: dialled, welcomed, replaced when an owner is
"""
