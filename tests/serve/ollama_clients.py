"""What a client of Ollama's API hears: a chat, a stream, a call, a schema; as JSON.

python ollama_clients.py URL ollama|langchain_ollama|litellm
"""

import json
import sys

ASKED = [{"role": "user", "content": "Hi"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}


def ollama(url):
    from ollama import Client

    client = Client(url)
    [call] = client.chat("fake", ASKED, tools=[TOOL]).message.tool_calls
    return {
        "chat": client.chat("fake", ASKED).message.content,
        "stream": [one.message.content for one in client.chat("fake", ASKED, stream=True)],
        "call": [call.function.name, dict(call.function.arguments)],
        "schema": client.chat("fake", ASKED, format=SCHEMA).message.content,
        "generate": client.generate("fake", "Hi").response,
        "models": [one.model for one in client.list().models],
        "context": client.show("fake").modelinfo["llama.context_length"],
    }


def langchain_ollama(url):
    from langchain_ollama import ChatOllama

    model = ChatOllama(model="fake", base_url=url)
    [call] = model.bind_tools([TOOL]).invoke("Hi").tool_calls
    schema = {"title": "Place", **SCHEMA}
    return {
        "chat": model.invoke("Hi").content,
        "stream": [one.content for one in model.stream("Hi")],
        "call": [call["name"], call["args"]],
        "schema": json.dumps(model.with_structured_output(schema).invoke("Hi")),
    }


def litellm(url):
    from litellm import completion

    def ask(**more):
        return completion("ollama_chat/fake", messages=ASKED, api_base=url, **more)

    [call] = ask(tools=[TOOL]).choices[0].message.tool_calls
    form = {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA}}
    return {
        "chat": ask().choices[0].message.content,
        "stream": [one.choices[0].delta.content or "" for one in ask(stream=True)],
        "call": [call.function.name, json.loads(call.function.arguments)],
        "schema": ask(response_format=form).choices[0].message.content,
    }


print(json.dumps(globals()[sys.argv[2]](sys.argv[1])))
