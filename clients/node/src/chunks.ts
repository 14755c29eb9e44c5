/** The parts of generated texts, as `execute` returns them. */

import { type FinishReason, wordOf } from "./enums.js";
import { errorFromStatus, type QuireError } from "./errors.js";
import { FinishReasonSchema, type SampleChunk, type TokenLogprob, type ToolCall, type Usage } from "./gen/quire/v1/runner_pb.js";

/** The next part of one sample. */
export interface Chunk {
  itemId: string;
  /** The number of the sample, of an item's `n`. */
  sample: number;
  /** The length of the sample before this chunk: in tokens, or in chunks if the runtime does not report tokens. */
  position: number;
  /** Whole characters only. */
  text: string;
  /** Empty if the runtime does not report tokens. */
  tokenIds: number[];
  /** One for each token, if `logprobs` or `sampledLogprobs` asked for them. */
  logprobs: TokenLogprob[];
  /** Parts of calls: first the id and the name, then `argumentsJson` in pieces. */
  toolCalls: ToolCall[];
  /** Undefined: the sample goes on. */
  finishReason: FinishReason | undefined;
  /** The stop text that ended the sample. */
  stop: string;
  /** Why the sample failed, with the `finishReason` "error". */
  error: QuireError | undefined;
  /** In the last chunk. */
  usage: Usage | undefined;
  /** Of this item, if another one than that of `Execution.started` runs it. */
  runtime: string;
}

/** The chunk in a message. */
export function chunkOf(message: SampleChunk): Chunk {
  const { itemId, sample, position, text, tokenIds, logprobs, toolCalls, stop, usage, runtime } = message;
  const finishReason = wordOf(FinishReasonSchema, message.finishReason) as FinishReason | undefined;
  const error = message.error && errorFromStatus(message.error);
  return { itemId, sample, position, text, tokenIds, logprobs, toolCalls, finishReason, stop, error, usage, runtime };
}
