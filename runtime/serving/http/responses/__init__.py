"""OpenAI's Responses API on top of chat completions: the same model, template and gateway; no response is stored.

items             the input items, and the chat messages that they stand for
schema            the fields of a request, and the chat request that it stands for
builder           one response: its object, and the events of its stream
api               the handler of the route
"""
