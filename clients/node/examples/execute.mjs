// Whole texts, at once and as a stream that goes on where a connection is lost: node examples/execute.mjs [TARGET]
import { QuireClient } from "quire-llm";

const client = new QuireClient(process.argv[2]);
try {
  console.log(await client.generate("12+34="));

  const texts = new Map();
  const execution = client.execute(["1+1=", "2+1=", "3+1="], { maxTokens: 4, keepMs: 60_000 });
  for await (const { itemId, text } of execution) texts.set(itemId, (texts.get(itemId) ?? "") + text);
  await execution.cancel(); // All is read: nothing has to be kept any more.
  console.log(Object.fromEntries(texts)); // { '0': '2', '1': '3', '2': '4' }
} finally {
  client.close();
}
