"""The HTTP server: the APIs of OpenAI, Anthropic and Ollama over one internal request.

Each API has a file, which turns its JSON into a `GenerationRequest` and the answer into its JSON.
They share, in the order of a request:

    middleware, auth       keys, hosts, origins, request ids, logs
    body                   bytes -> a validated pydantic model
    request, template      the internal request; its messages -> token ids
    handler                submits jobs to the engine and follows their events
    parts, tools, grammar  text -> text, reasoning and tool calls; forced calls and schemas
    sse, openai_common     streams; usage and log-probabilities
"""
