"""What every room stands on: checks and their messages, the native module, types of
arguments, and how primitives are made, batched and lowered.

It imports no other room.
"""
