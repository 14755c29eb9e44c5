// Many sequences at once on one stream, each with a loop of its own: node examples/session.mjs [TARGET]
import { QuireClient, QuireError } from "quire-llm";

const PROMPTS = [
  [1, 2, 3],
  [4, 5, 6, 7],
];
const STEPS = 4;

const client = new QuireClient(process.argv[2], { timeoutMs: 60_000 });
const session = client.session();

async function generate(prompt) {
  const cache = await session.prefill(prompt);
  const tokens = [cache.output.tokenId];
  while (tokens.length < STEPS) tokens.push((await cache.decode(tokens.at(-1))).tokenId);
  await cache.release();
  return tokens;
}

try {
  // What is sent together runs together.
  console.log(await Promise.all(PROMPTS.map(generate)));
} catch (error) {
  if (!(error instanceof QuireError)) throw error;
  console.error(error.code, error.reason, error.metadata, error.retryDelayMs);
  process.exitCode = 1;
} finally {
  await session.close();
  client.close();
}
