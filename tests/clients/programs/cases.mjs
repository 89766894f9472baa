// Runs a client's cases in turn and prints one line of JSON for each: what came, or what went wrong.

export const words = JSON.parse(process.env.CLIENT_WORDS)
export const baseURL = process.env.OPENAI_BASE_URL
export const apiKey = process.env.OPENAI_API_KEY

export class Weather {
  calls = []

  get(city) {
    this.calls.push(['get_weather', { city }])
    return words.result
  }
}

export async function run(cases) {
  for (const [name, one] of Object.entries(cases)) {
    const began = performance.now()
    const line = { case: name }
    try {
      line.came = await one()
    } catch (error) {
      line.error = `${error?.stack ?? error}\n${error?.responseBody ?? ''}`
    }
    line.seconds = Math.round((performance.now() - began) / 10) / 100
    console.log(`\nCASE ${JSON.stringify(line)}`)
  }
}
