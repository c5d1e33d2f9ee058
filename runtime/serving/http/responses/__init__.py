"""OpenAI's Responses API on top of chats: the same model, template and gateway; nothing of a response is kept.

items             what the input may hold, and the messages that it stands for
schema            what a client may say, and the chat that it asks for
told              one response: its object, and the events of its stream
api               what the route does
"""
