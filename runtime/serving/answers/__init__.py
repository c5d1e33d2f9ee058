"""The gateway: from a prompt to a stream of tokens, with failover between the peers that run the stages.

failover          the response to each fault; pure
slowdown          detects that tokens have become clearly slower; pure
route_choice      the cheapest route; pure
served_model      a model at the gateway: its manifest and its tokenizer
routes            which peers run the stages of a model
catalog           which models are served
task              one completion to generate, and the model's inputs; pure
expected_prefixes   which prefixes the stages should have cached; pure
gateway_session   sessions at the gateway's end
session_pair      the current session of a completion, and the next
liveness          whether the stages are alive and make progress
moves             planned moves to another session
owner_reports     owners that seem to have failed, reported once for all completions
recovery          failover to another session after a fault
generation        one completion: tokens in order, over as many sessions as it takes
answer_text       detokenization, up to a stop string
text_threads      tokenization and detokenization, in threads
clients           large requests that arrive, responses that are not read
gateway           admission, and requests of clients

Words: a route is one holder for each stage; a tenant is a client with its share of the gateway and a prefix cache of its own.
"""
