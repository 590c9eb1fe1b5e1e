"""The server: dialects of others' clients over one internal request.

A dialect is a file that turns its JSON into an `Ask` and the pieces of answers back into its JSON,
whole or as a stream. What they share comes in the order of a request:

    guard      who may speak, and how much: hosts, origins, keys, sizes, times
    body       bytes -> JSON within bounds
    ask        the internal request; template: its messages -> token ids
    desk       asks the engine, counts; answering: follows its jobs
    parts      text -> reasoning, tool calls, text; tools and grammar: their syntax
    *_answers  pieces of all choices, usage, in each dialect
"""
