"""What is asked and what is answered, for whoever asks. Loads no torch.

request       what a client asks, and what it gets
stop          texts that end an answer; pure
chat_format   how a model is chatted with
client        asking any peer, and another where it vanishes
"""
