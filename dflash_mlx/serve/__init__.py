"""The HTTP server: the APIs of OpenAI, Anthropic and Ollama over one internal request.

Each API has a file, which turns its JSON into a `GenerationRequest` and the answer into its JSON.
They share, in the order of a request:

    middleware, auth       keys, hosts, origins, request ids, logs
    body, fields, content  bytes -> a validated pydantic model, and the text of messages
    request, template      the internal request; its messages -> token ids
    handler, grammar       jobs of the engine; schemas and forced calls
    steps                  the answers of these jobs, step by step
    response, sse          events of an API, sent one by one or put together
"""
