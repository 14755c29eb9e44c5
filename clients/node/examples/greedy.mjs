// A greedy loop, one call for each token: node examples/greedy.mjs [TARGET]
// For other models read tokens with a tokenizer library from GetModelInfo's tokenizer.json; the one that adds has a
// token for each character, so that its vocabulary is enough here.
import { QuireClient } from "quire-llm";

const client = new QuireClient(process.argv[2], { timeoutMs: 60_000 });
try {
  const { model, tokenizerJson } = await client.modelInfo({ includeTokenizer: true });
  const vocabulary = JSON.parse(Buffer.from(tokenizerJson).toString()).model.vocab;
  const characters = new Map(Object.entries(vocabulary).map(([character, id]) => [id, character]));
  const cache = await client.prefill([..."12+34="].map((character) => vocabulary[character]));
  let answer = "";
  let token = cache.output.tokenId;
  while (!model.eosTokenIds.includes(token)) {
    answer += characters.get(token);
    token = (await cache.decode(token)).tokenId;
  }
  await cache.release();
  console.log(answer); // 46
} finally {
  client.close();
}
