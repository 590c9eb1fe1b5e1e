"""The HTTP server: the APIs of OpenAI, Anthropic and Ollama over one internal request.

Each API has a file that turns its JSON into a `GenerationRequest`, and the answer into its JSON.
All APIs share these modules, in the order in which a request passes them:

    middleware, auth              keys, hosts, origins, request ids, logs
    body, fields, content         turn bytes into a validated model and the text of messages
    generation_request, template  the internal request, and its token ids
    handler, grammar              jobs of the engine, schemas and forced calls
    steps                         the answers of the jobs, step by step
    response, sse                 the events of an API, sent one by one or combined
"""
