// Whole texts as a stream, which goes on where a connection is lost: node examples/execute.mjs [TARGET]
import { errorFromStatus, item, QuireClient } from "quire-llm";

const client = new QuireClient(process.argv[2]);
try {
  for await (const chunk of client.execute("12+34=")) process.stdout.write(chunk.text);
  console.log();

  const items = [1, 2, 3].map((n) => item(`${n}+1=`, { itemId: String(n), maxTokens: 4 }));
  const texts = new Map();
  const execution = client.execute(items, { keepMs: 60_000 });
  for await (const chunk of execution) {
    if (chunk.error) throw errorFromStatus(chunk.error); // Of this item alone; the others go on.
    texts.set(chunk.itemId, (texts.get(chunk.itemId) ?? "") + chunk.text);
  }
  await execution.cancel(); // All is read: nothing has to be kept any more.
  console.log(Object.fromEntries(texts)); // { '1': '2', '2': '3', '3': '4' }
} finally {
  client.close();
}
