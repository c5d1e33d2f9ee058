"""What a gateway does: from a prompt to a stream of tokens, whatever happens to the stages.

failover          whose fault it is, and what to do; pure
slowdown          whether tokens come clearly slower; pure
route_choice      which holder of each stage; pure
served_model      a model as a gateway has it: its manifest and its tokenizer
routes            who runs the stages of a model
catalog           which models are served
task              what is to be answered, and what the model reads of it; pure
expected_prefixes   which prefixes stages should retain; pure
gateway_session   sessions as a gateway holds them
session_pair      the session of an answer that runs, and the next
liveness          whether the stages are there and get on
moves             to the next session while one runs
owner_reports     owners that seem to have vanished, reported once for all answers
recovery          to the next session after a fault
generation        one answer: tokens in order, over as many sessions as it takes
answer_text       the text of its tokens, up to a stop text
text_threads      text to token ids and back, where tokenizers run
clients           large questions on their way, answers that nobody reads
gateway           requests and clients

Words: a route is one holder for each stage.
"""
