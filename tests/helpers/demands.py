"""Answers with a JSON schema and forced tool calls, in every API, with the SDKs of two vendors.

Each function of `WAYS` requests an answer with a schema, and yields the JSON of the answer, as text
or parsed, together with the schema that it has to fit.
"""

import json
from itertools import product

import jsonschema

QUESTION = [{"role": "user", "content": "What is 37 plus 48?"}]


def closed_object(**properties):
    """The schema of an object with these properties only."""
    required = {"required": [*properties], "additionalProperties": False}
    return {"type": "object", "properties": properties, **required}


def digits(most):
    """The schema of an array of at most `most` digits."""
    digit = {"type": "integer", "minimum": 0, "maximum": 9}
    return {"type": "array", "items": digit, "maxItems": most}


SUM = closed_object(right={"type": "boolean"}, digits=digits(2))
LEAVES = {"type": "array", "items": {"$ref": "#/$defs/leaf"}, "maxItems": 2}
PART = {"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 100}
DEFINED = {"leaf": closed_object(digits=digits(1)), "node": closed_object(leaves=LEAVES)}
COUNT = {"type": "integer", "minimum": -40, "maximum": 1200}
SCHEMAS = {
    "sum": SUM,
    "words": closed_object(
        unit={"enum": ["C", "F", None]},
        title={"type": "string", "minLength": 1, "maxLength": 12},
        code={"type": "string", "pattern": "^[A-Z]{2}-[0-9]{1,3}$"},
        day={"type": "string", "format": "date"},
    ),
    "either": closed_object(value={"anyOf": [SUM, {"type": "null"}, {"const": "none at all"}]}),
    "tree": closed_object(root={"$ref": "#/$defs/node"}, part=PART) | {"$defs": DEFINED},
    "optional": closed_object(count=COUNT, sum=SUM) | {"required": ["sum"]},
}


class Asker:
    """Sends requests with a seed, with the clients of OpenAI and of Anthropic."""

    def __init__(self, chat, claude, seed):
        self.openai = chat
        self.claude = claude
        self.seed = seed

    def chat(self, **more):
        more |= {"seed": self.seed, "temperature": 1}
        return self.openai.chat.completions.create(model="m", messages=QUESTION, **more)

    def response(self, **more):
        question = f"{self.seed} and 48?"
        return self.openai.responses.create(model="m", input=question, temperature=1, **more)

    def message(self, **more):
        messages = [{"role": "user", "content": f"What is {self.seed} plus 48?"}]
        more |= {"extra_body": {"temperature": 1}, "max_tokens": 900}
        return self.claude.messages.create(model="m", messages=messages, **more)


def form(name, schema):
    return {"type": "json_schema", "json_schema": {"name": name, "schema": schema}}


def tool(name, schema, **more):
    return {"type": "function", "function": {"name": name, "parameters": schema, **more}}


def chat_format(asker, name, schema):
    answer = asker.chat(response_format=form(name, schema))
    yield answer.choices[0].message.content, schema


def chat_stream(asker, name, schema):
    parts = asker.chat(response_format=form(name, schema), stream=True)
    yield "".join(part.choices[0].delta.content or "" for part in parts), schema


def response_format(asker, name, schema):
    text = {"format": {"type": "json_schema", "name": name, "schema": schema}}
    yield asker.response(text=text).output_text, schema


def message_format(asker, name, schema):
    output = {"format": {"type": "json_schema", "schema": schema}}
    yield asker.message(output_config=output).content[0].text, schema


def required_call(asker, name, schema):
    """Calls of either of two tools. Several calls are allowed for the smallest schema only.

    The embedded pair makes as many as it may, which takes long for other schemas.
    """
    tools = [tool(name, schema), tool("other", SUM)]
    several = schema is SUM
    answer = asker.chat(tools=tools, tool_choice="required", parallel_tool_calls=several)
    [choice] = answer.choices
    assert choice.finish_reason == "tool_calls" and choice.message.tool_calls
    for call in choice.message.tool_calls:
        yield call.function.arguments, {name: schema, "other": SUM}[call.function.name]


def named_call(asker, name, schema):
    """A streamed call of one of two strict tools, which is chosen by its name."""
    tools = [tool("other", SUM, strict=True), tool(name, schema, strict=True)]
    choice = {"type": "function", "function": {"name": name}}
    parts = asker.chat(tools=tools, tool_choice=choice, stream=True)
    [call] = [tool_call for part in parts for tool_call in part.choices[0].delta.tool_calls or ()]
    assert call.function.name == name
    yield call.function.arguments, schema


def response_call(asker, name, schema):
    named = {"type": "function", "name": name, "parameters": schema, "strict": True}
    answer = asker.response(tools=[named], tool_choice="required", parallel_tool_calls=False)
    [call] = [item for item in answer.output if item.type == "function_call"]
    yield call.arguments, schema


def message_call(asker, name, schema):
    choice = {"type": "tool", "name": name, "disable_parallel_tool_use": True}
    answer = asker.message(tools=[{"name": name, "input_schema": schema}], tool_choice=choice)
    assert answer.stop_reason == "tool_use"
    yield answer.content[-1].input, schema


WAYS = (chat_format, chat_stream, response_format, message_format)
WAYS += (required_call, named_call, response_call, message_call)


def cases(seeds):
    """Every combination of a function of `WAYS`, the name of a schema, and a seed."""
    return [(way, name, seed) for seed, name, way in product(range(seeds), SCHEMAS, WAYS)]


def check(chat, claude, way, name, seed):
    """Request an answer of one of the `cases`, and check that it fits its schema."""
    for value, schema in way(Asker(chat, claude, seed), name, SCHEMAS[name]):
        jsonschema.validate(json.loads(value) if isinstance(value, str) else value, schema)
