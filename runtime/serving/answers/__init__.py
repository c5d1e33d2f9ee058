"""What a gateway does: from a prompt to a stream of tokens, whatever happens to the stages.

failover          whose fault it is, and what to do; pure
pace              whether tokens come clearly slower; pure
route_choice      which holder of each stage; pure
catalog           which models are served, and by whom
gateway_session   sessions as a gateway holds them
generation        one answer
gateway           requests and clients

Words: a route is one holder for each stage.
"""
