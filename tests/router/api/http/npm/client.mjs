// OpenAI's client of npm against the server whose base URL is the argument. Prints what it was told, as JSON.
import OpenAI from "openai";

const client = new OpenAI({ baseURL: process.argv[2], apiKey: "none", maxRetries: 0 });
const asked = { model: "fake", messages: [{ role: "user", content: "hello" }], seed: 5, max_tokens: 6 };
const tools = JSON.parse(process.argv[3]);
const told = {};

told.models = (await client.models.list()).data.map((model) => model.id);

const whole = await client.chat.completions.create(asked);
told.whole = [whole.choices[0].message.content, whole.choices[0].finish_reason, whole.usage.completion_tokens];

told.streamed = ["", 0];
const stream = await client.chat.completions.create({ ...asked, stream: true, stream_options: { include_usage: true } });
for await (const chunk of stream) {
  told.streamed[0] += chunk.choices[0]?.delta?.content ?? "";
  told.streamed[1] = chunk.usage?.completion_tokens ?? told.streamed[1];
}

const completion = await client.completions.create({ model: "fake", prompt: "hello", seed: 5, max_tokens: 6 });
told.completion = completion.choices[0].text;

const runner = client.chat.completions.stream({ ...asked, tools, max_tokens: 400, stop: ["!"] });
const called = (await runner.finalChatCompletion()).choices[0];
told.called = [called.finish_reason, called.message.tool_calls.map((one) => [one.function.name, one.function.arguments])];

told.responses = "";
for await (const event of await client.responses.create({ model: "fake", input: "hello", seed: 5, max_output_tokens: 6, stream: true })) {
  if (event.type === "response.output_text.delta") told.responses += event.delta;
  if (event.type === "response.incomplete") told.ended = [event.response.status, event.response.usage.output_tokens];
}

const controller = new AbortController();
const left = await client.chat.completions.create({ ...asked, max_tokens: 50000, stream: true }, { signal: controller.signal });
for await (const _ of left) controller.abort();

told.refused = [];
for (const wrong of [{ temperature: -1 }, { model: "nobody" }]) {
  try {
    await client.chat.completions.create({ ...asked, ...wrong });
  } catch (error) {
    told.refused.push([error.constructor.name, error.status, error.param, error.code]);
  }
}

console.log(JSON.stringify(told));
