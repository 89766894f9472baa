// Vercel's AI SDK, by its provider for compatible servers or by one of OpenAI's two (`AI_SDK_MODEL`).
import * as ai from 'ai'
import { createOpenAI } from '@ai-sdk/openai'
import { createOpenAICompatible } from '@ai-sdk/openai-compatible'
import { z } from 'zod'
import { Weather, apiKey, baseURL, run, words } from './cases.mjs'

const compatible = { name: 'shoal', baseURL, apiKey, includeUsage: true, supportsStructuredOutputs: true }
const models = {
  compatible: () => createOpenAICompatible(compatible)(words.model),
  chat: () => createOpenAI({ baseURL, apiKey }).chat(words.model),
  responses: () => createOpenAI({ baseURL, apiKey }).responses(words.model),
}
const model = models[process.env.AI_SDK_MODEL]()
// Else it hands back what was answered by its id alone, and a server that keeps nothing does not know it.
const providerOptions = { openai: { store: false } }
const asked = { model, temperature: 0, maxRetries: 0, providerOptions }
const description = z.object({ city: z.string(), sky: z.string(), degrees: z.number().int() })

const toolsOf = (weather) => ({
  get_weather: ai.tool({
    description: 'The weather in a city.',
    inputSchema: z.object({ city: z.string() }),
    execute: async ({ city }) => weather.get(city),
  }),
})

async function joined(answer) {
  let text = ''
  for await (const part of answer.fullStream) {
    if (part.type === 'error') throw part.error
    if (part.type === 'text-delta') text += part.text
  }
  return text
}

await run({
  async chat() {
    return (await ai.generateText({ ...asked, prompt: words.greeting })).text
  },

  async stream() {
    return await joined(ai.streamText({ ...asked, prompt: words.greeting }))
  },

  async structured() {
    const output = ai.Output.object({ schema: description })
    return (await ai.generateText({ ...asked, prompt: words.describe, output })).output
  },

  async streamed_structured() {
    const answer = ai.streamText({
      ...asked,
      prompt: words.describe,
      output: ai.Output.object({ schema: description }),
    })
    let last
    for await (const partial of answer.partialOutputStream) last = partial
    return last
  },

  async history() {
    const messages = []
    for (const content of [words.greeting, words.describe, words.greeting]) {
      messages.push({ role: 'user', content })
      const answer = await ai.generateText({ ...asked, messages })
      messages.push(...answer.response.messages)
    }
    return messages.at(-1).content[0].text
  },

  async tools() {
    const weather = new Weather()
    const answer = await ai.generateText({
      ...asked,
      prompt: words.weather,
      tools: toolsOf(weather),
      stopWhen: ai.stepCountIs(3),
    })
    return { calls: weather.calls, answer: answer.text }
  },

  async streamed_tools() {
    const weather = new Weather()
    const answer = ai.streamText({
      ...asked,
      prompt: words.weather,
      tools: toolsOf(weather),
      stopWhen: ai.stepCountIs(3),
    })
    return { calls: weather.calls, answer: await joined(answer) }
  },

  async named_tool() {
    const tools = { get_weather: ai.tool({ inputSchema: z.object({ city: z.string() }) }) }
    const toolChoice = { type: 'tool', toolName: 'get_weather' }
    const answer = await ai.generateText({
      ...asked,
      prompt: words.weather,
      tools,
      toolChoice,
      maxOutputTokens: 200,
    })
    return answer.toolCalls.map((call) => [call.toolName, call.input])
  },
})
