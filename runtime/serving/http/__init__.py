"""OpenAI's API in front of the gateway, on a port of this machine. Knows no peers: every completion comes from the gateway.

config            where it listens, and who may use it
errors            what can go wrong, as OpenAI's API says it
guard             who is let in
body              request bodies, bounded
generation_fields   the fields that all requests for completions have, checked
schema            requests: completions, chats, embeddings
generate_requests   from a request body to requests for the gateway
chat_format       the variables of the model's chat template
tool_calls        tool calls in a model's output; pure
metrics           what `/metrics` shows
answers           the completions of one request, generated concurrently
embedding         the handler of /v1/embeddings
shapes            completions as the API writes them
route             which peers run the stages of a completion
events            responses on their way to a client, as a stream or whole
api               the handlers of the routes
chat_page         the page at `/`, whose files are in the folder beside it
responses/        OpenAI's Responses API, on top of chats
port/             the port that all of it answers at
"""
