// OpenAI's own client for JavaScript, with its helpers for streams, tools and zod.
import assert from 'node:assert'
import OpenAI from 'openai'
import { zodResponseFormat } from 'openai/helpers/zod'
import { z } from 'zod'
import { Weather, run, words } from './cases.mjs'

const client = new OpenAI({ maxRetries: 0 })
const user = (text) => ({ role: 'user', content: text })
const asked = { model: words.model, temperature: 0 }
const description = z.object({ city: z.string(), sky: z.string(), degrees: z.number().int() })
const parameters = {
  type: 'object',
  properties: { city: { type: 'string' } },
  required: ['city'],
  additionalProperties: false,
}
const tool = { type: 'function', function: { name: 'get_weather', parameters } }

const runnable = (weather) => ({
  type: 'function',
  function: {
    name: 'get_weather',
    description: 'The weather in a city.',
    parameters,
    parse: JSON.parse,
    function: ({ city }) => weather.get(city),
  },
})

async function create(more) {
  const answer = await client.chat.completions.create({ ...asked, ...more })
  return answer.choices[0]
}

await run({
  async chat() {
    return (await create({ messages: [user(words.greeting)] })).message.content
  },

  async stream() {
    let text = ''
    const chunks = await client.chat.completions.create({
      ...asked,
      messages: [user(words.greeting)],
      stream: true,
    })
    for await (const chunk of chunks) text += chunk.choices[0]?.delta?.content ?? ''
    return text
  },

  async stream_helper() {
    let text = ''
    const stream = client.chat.completions.stream({
      ...asked,
      messages: [user(words.greeting)],
      stream_options: { include_usage: true },
    })
    stream.on('content', (delta) => (text += delta))
    const final = await stream.finalChatCompletion()
    assert.equal(final.choices[0].message.content, text)
    assert(final.usage.completion_tokens > 0)
    return text
  },

  async structured() {
    const answer = await client.chat.completions.parse({
      ...asked,
      messages: [user(words.describe)],
      response_format: zodResponseFormat(description, 'description'),
    })
    return answer.choices[0].message.parsed
  },

  async history() {
    const messages = []
    for (const text of [words.greeting, words.describe, words.greeting]) {
      messages.push(user(text))
      messages.push((await create({ messages })).message)
    }
    return messages.at(-1).content
  },

  async tools() {
    const weather = new Weather()
    const messages = [user(words.weather)]
    const first = await create({ messages, tools: [tool] })
    assert.equal(first.finish_reason, 'tool_calls')
    messages.push(first.message)
    for (const call of first.message.tool_calls) {
      const content = weather.get(JSON.parse(call.function.arguments).city)
      messages.push({ role: 'tool', tool_call_id: call.id, content })
    }
    const last = await create({ messages, tools: [tool] })
    assert.equal(last.finish_reason, 'stop')
    return { calls: weather.calls, answer: last.message.content }
  },

  async streamed_tools() {
    const weather = new Weather()
    const runner = client.chat.completions.runTools({
      ...asked,
      messages: [user(words.weather)],
      tools: [runnable(weather)],
      stream: true,
    })
    return { calls: weather.calls, answer: await runner.finalContent() }
  },

  async named_tool() {
    const choice = await create({
      messages: [user(words.weather)],
      tools: [tool],
      tool_choice: { type: 'function', function: { name: 'get_weather' } },
      max_tokens: 200,
    })
    return choice.message.tool_calls.map((call) => [call.function.name, JSON.parse(call.function.arguments)])
  },
})
