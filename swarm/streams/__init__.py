"""Streams of frames over libp2p. Knows nothing of who is in the swarm, or of what frames mean.

frames            the wire format of a frame, and its caps; pure
frame_parser      cuts received bytes into frames; no I/O
frame_stream      a stream of frames over one socket, and its three ways to end
memory_stream     the same within one process
striping          one stream over several of libp2p's
queued_stream     a long-lived stream with a writer task, and its hello
handlers          runs the handler of each incoming stream in a task, with limits; sends errors in one line
p2p               the transport between real peers
p2p_config        its configuration
p2pd              libp2p's daemon process: started, watched, ended with us
p2pd_control      requests to it, and hivemind's view of it for the DHT
p2pd_guard        the process that ends p2pd when we end
peer_ids          peer ids as text, bytes and hivemind's objects
dialer            dials peers through p2pd, and replaces dead connections
dial_workaround   a workaround for libp2p's dial backoff
reachable         which of our addresses others can dial
traffic           how many bytes went to and came from each peer
receive_log       when the bytes of payloads were received
link_estimate     a link's rate and round trip, estimated from timings; pure

Words: a frame is one message, of a header and a payload; striping, one stream over several of libp2p's, its lanes.
"""
