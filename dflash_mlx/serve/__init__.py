"""The HTTP server: the APIs of OpenAI, Anthropic and Ollama over one internal request.

Each API has a file, which turns its JSON into a `GenerationRequest` and the answer into its JSON.
They share, in the order of a request:

    middleware, auth       keys, hosts, origins, request ids, logs
    body                   bytes -> a validated pydantic model
    request, template      the internal request; its messages -> token ids
    handler, grammar       jobs of the engine and their events; schemas and forced calls
    response, sse          whole answers and streams, usage and log-probabilities
"""
