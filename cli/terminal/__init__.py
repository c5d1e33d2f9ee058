"""What commands share. Knows no swarm.

options        options and how their values are read
output         text for people, JSON for programs, one status line
errors         from an exception to a line and an exit code
logs           log lines, harmless and not too many
loop           one event loop, in this thread or beside it, and an end in order
extras         what is installed beside the client
fast_imports   imports for less
"""
