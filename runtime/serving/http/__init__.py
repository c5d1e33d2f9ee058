"""OpenAI's API in front of the gateway, on a port of this machine. Knows no peers: whatever it answers, the gateway gives.

config            where it listens, and who may use it
errors            what can go wrong, as OpenAI's API says it
guard             who is let in
body              request bodies, bounded
schema            what a client may say
asking            from that to what a gateway is asked
chat_format       what a request says to the model's template
tool_calls        calls of tools in what a model says; pure
metrics           what `/metrics` shows
answers           the answers to one request, side by side
embedding         what answers for vectors of texts
shapes            answers as the API writes them
route             which peers run the stages of an answer
events            answers on their way to a client
api               what the routes do
chat_page         the page at `/`, whose files are in the folder beside it
responses/        OpenAI's Responses API, on top of chats
port/             the port that all of it answers at
"""
