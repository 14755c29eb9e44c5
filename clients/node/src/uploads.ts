/** Sends files on the stream of one call, in parts: of an adapter, or of weights. */

import { createHash } from "node:crypto";
import { open, readdir, stat } from "node:fs/promises";
import { join } from "node:path";

import type { LoadAdapterRequestSchema } from "./gen/quire/v1/admin_pb.js";
import type { UploadWeightsRequestSchema } from "./gen/quire/v1/runner_pb.js";
import type { Request } from "./methods.js";

type AdapterRequest = Request<typeof LoadAdapterRequestSchema>;
type WeightsRequest = Request<typeof UploadWeightsRequestSchema>;

/** A directory of this machine, or the contents of the files by their names. */
export type AdapterFiles = string | Readonly<Record<string, Uint8Array>>;
/** The contents of a file, or its path. */
export type FileContent = Uint8Array | string;
/**
 * A directory or a safetensors file of this machine; the contents of one; or several files, as contents or paths. Each is
 * needed only while it is sent.
 */
export type WeightFiles = string | Uint8Array | Iterable<FileContent> | AsyncIterable<FileContent>;

// Larger ones cost a server with glibc twice the time: it maps memory for each message.
const MAX_PART_BYTES = 1 << 18;
const ADAPTER_FILES = ["adapter_config.json", "adapter_model.safetensors"];
const INDEX = "model.safetensors.index.json";
// Of a header of safetensors, by the format.
const MAX_HEADER_BYTES = 100_000_000;
// What a header says besides tensors.
const METADATA = "__metadata__";

/** Those of one LoadAdapter. Throws RangeError unless there is either a source or files, and errors of unreadable files. */
export async function* adapterRequests(
  settings: AdapterRequest,
  files: AdapterFiles | undefined,
  maxRequestBytes: number,
): AsyncGenerator<AdapterRequest> {
  if (Boolean(settings.source) === (files !== undefined)) throw new RangeError("an adapter has either a source or files");
  const isDirectory = typeof files === "string";
  const named = isDirectory ? ADAPTER_FILES.map((name) => [name, join(files, name)] as const) : Object.entries(files ?? {});
  yield settings;
  for (const [name, content] of named) {
    for await (const data of partsOf(content, maxRequestBytes)) yield { file: { name, data } };
  }
}

/** Those of one UploadWeights: the files, and an index of their tensors. Throws RangeError for other files. */
export async function* weightRequests(files: WeightFiles, maxRequestBytes: number): AsyncGenerator<WeightsRequest> {
  const weightMap = new Map<string, string>();
  let number = 0;
  for await (const content of await contentsOf(files)) {
    const name = `model-${String(++number).padStart(5, "0")}.safetensors`;
    for (const tensor of await tensorsOf(content)) {
      if (weightMap.has(tensor)) throw new RangeError(`the tensor ${tensor} is in two files`);
      weightMap.set(tensor, name);
    }
    yield* fileRequests(name, content, maxRequestBytes);
  }
  const index = Buffer.from(JSON.stringify({ weight_map: Object.fromEntries(weightMap) }));
  yield* fileRequests(INDEX, index, maxRequestBytes);
}

async function contentsOf(files: WeightFiles): Promise<Iterable<FileContent> | AsyncIterable<FileContent>> {
  if (files instanceof Uint8Array) return [files];
  if (typeof files !== "string") return files;
  if (!(await stat(files)).isDirectory()) return [files];
  const names = (await readdir(files)).filter((name) => name.endsWith(".safetensors")).sort();
  if (!names.length) throw new RangeError(`there are no safetensors files in ${files}`);
  return names.map((name) => join(files, name));
}

async function* fileRequests(name: string, content: FileContent, maxRequestBytes: number): AsyncGenerator<WeightsRequest> {
  const size = typeof content === "string" ? (await stat(content)).size : content.length;
  yield { name, sizeBytes: BigInt(size) };
  const digest = createHash("sha256");
  for await (const data of partsOf(content, maxRequestBytes)) {
    digest.update(data);
    yield { data };
  }
  yield { sha256: digest.digest() };
}

/** The names in the header of a safetensors file. */
async function tensorsOf(content: FileContent): Promise<string[]> {
  const prefix = Buffer.from(await rangeOf(content, 0, 8));
  const size = prefix.length === 8 ? Number(prefix.readBigUInt64LE()) : 0;
  try {
    const header: unknown = JSON.parse(Buffer.from(await rangeOf(content, 8, Math.min(size, MAX_HEADER_BYTES))).toString());
    if (typeof header === "object" && header !== null) return Object.keys(header).filter((name) => name !== METADATA);
  } catch (error) {
    if (!(error instanceof SyntaxError)) throw error;
  }
  throw new RangeError("a file is not in safetensors format");
}

async function rangeOf(content: FileContent, start: number, length: number): Promise<Uint8Array> {
  if (typeof content !== "string") return content.subarray(start, start + length);
  const file = await open(content);
  try {
    const size = Math.max(0, Math.min(length, (await file.stat()).size - start));
    const { buffer, bytesRead } = await file.read(Buffer.alloc(size), 0, size, start);
    return buffer.subarray(0, bytesRead);
  } finally {
    await file.close();
  }
}

/** A file in parts that fit into requests. At least one, also of an empty file. */
async function* partsOf(content: FileContent, maxRequestBytes: number): AsyncGenerator<Uint8Array> {
  const partBytes = Math.min(MAX_PART_BYTES, maxRequestBytes >> 1);
  if (typeof content !== "string") {
    for (let start = 0; start === 0 || start < content.length; start += partBytes) yield content.subarray(start, start + partBytes);
    return;
  }
  const file = await open(content);
  try {
    for (let isFirst = true; ; isFirst = false) {
      // A buffer for each part, because it is sent later.
      const { buffer, bytesRead } = await file.read(Buffer.allocUnsafe(partBytes), 0, partBytes, null);
      if (!bytesRead && !isFirst) return;
      yield buffer.subarray(0, bytesRead);
    }
  } finally {
    await file.close();
  }
}
