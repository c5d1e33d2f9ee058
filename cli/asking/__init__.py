"""What `generate` and `chat` share, and how a conversation goes. Knows no way into the swarm.

settings       options that say how tokens are chosen
features       sound from a file, for a model that hears
answer_trace   how fast an answer came, and through whom
conversation   the messages so far, and what an input line means; pure
line_input     lines from a terminal, a pipe or a file
partner        the model that is talked with
talk           line after line
"""
