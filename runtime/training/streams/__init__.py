"""The streams between a hosted stage and its partner stages. Knows nothing of what frames mean.

fence          which peer may send for each partner, by term
suspicion      an owner that does not answer: its standbys probe it
partner        one partner: the streams to and from it, its owner as far as we know
partners       all of them: dialled, accepted, replaced
"""
