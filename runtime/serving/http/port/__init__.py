"""The port of the HTTP API: the whole of it, in front of the peer's gateway.

app               the routes, and what comes before them
running           uvicorn in a loop that is not its own
server            the port, opened with the peer
"""
