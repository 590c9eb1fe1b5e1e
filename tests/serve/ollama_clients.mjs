// What a client of Ollama's API hears: a chat, a stream, a call, a schema; as JSON.
//
//     node ollama_clients.mjs URL ollama|ollama-ai-provider-v2    (NODE_PATH says where they are)
import { createRequire } from "node:module";

const [url, client] = process.argv.slice(2);
const require = createRequire(import.meta.url);
const asked = { model: "fake", messages: [{ role: "user", content: "Hi" }] };
const schema = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };

const clients = {
  async ollama() {
    const { Ollama } = require("ollama");
    const ollama = new Ollama({ host: url });
    const stream = [];
    for await (const one of await ollama.chat({ ...asked, stream: true })) stream.push(one.message.content);
    const tools = [{ type: "function", function: { name: "weather", parameters: schema } }];
    const call = (await ollama.chat({ ...asked, tools })).message.tool_calls[0].function;
    return {
      chat: (await ollama.chat(asked)).message.content,
      stream,
      call: [call.name, call.arguments],
      schema: (await ollama.chat({ ...asked, format: schema })).message.content,
    };
  },
  async "ollama-ai-provider-v2"() { // of the AI SDK
    const { createOllama } = require("ollama-ai-provider-v2");
    const { generateObject, generateText, jsonSchema, streamText, tool } = require("ai");
    const ask = { model: createOllama({ baseURL: `${url}/api` })("fake"), prompt: "Hi" };
    const stream = [];
    for await (const one of streamText(ask).textStream) stream.push(one);
    const tools = { weather: tool({ inputSchema: jsonSchema(schema) }) };
    const [call] = (await generateText({ ...ask, tools })).toolCalls;
    return {
      chat: (await generateText(ask)).text,
      stream,
      call: [call.toolName, call.input],
      schema: JSON.stringify((await generateObject({ ...ask, schema: jsonSchema(schema) })).object),
    };
  },
};
console.log(JSON.stringify(await clients[client]()));
