/** Streams of generated text, which `execute` returns. */

import { setTimeout as sleep } from "node:timers/promises";

import { type ServiceError, status } from "@grpc/grpc-js";

import type { CallOptions } from "./connection.js";
import { durationOf } from "./duration.js";
import { errorFromCall } from "./errors.js";
import type {
  DeepPartial,
  ExecuteItem,
  ExecuteRequest,
  ExecuteResponse,
  ExecutionStarted,
  SampleChunk,
} from "./gen/quire/v1/runner.js";
import { ChatRole } from "./gen/quire/v1/runner.js";

// The delay between two attempts to resume: the first, and the maximum.
const INITIAL_BACKOFF_MS = 100;
const MAX_BACKOFF_MS = 2000;

const ROLES = {
  system: ChatRole.CHAT_ROLE_SYSTEM,
  user: ChatRole.CHAT_ROLE_USER,
  assistant: ChatRole.CHAT_ROLE_ASSISTANT,
  tool: ChatRole.CHAT_ROLE_TOOL,
};

/** A text to continue, token ids, or messages for the model's chat template. */
export type Prompt = string | readonly number[] | readonly { role: keyof typeof ROLES; content: string }[];

export interface ExecuteSettings extends CallOptions {
  /** The key to resume or cancel the execution with. Empty: one is generated. */
  requestId?: string;
  /** How long the server keeps the execution without a reader. The stream then resumes after a lost connection. */
  keepMs?: number;
  /** Other fields of ExecuteRequest: runtime, policy, maxCostUsd, priority. */
  request?: Omit<DeepPartial<ExecuteRequest>, "items" | "requestId" | "keep" | "resumeAfter">;
}

/** An item for `execute`, with other fields of ExecuteItem, such as maxTokens, sampling, stop, n, constraint. */
export function item(prompt: Prompt, settings: DeepPartial<ExecuteItem> = {}): DeepPartial<ExecuteItem> {
  return { itemId: "0", ...settings, prompt: promptOf(prompt) };
}

function promptOf(prompt: Prompt): NonNullable<DeepPartial<ExecuteItem>["prompt"]> {
  if (typeof prompt === "string") return { $case: "text", value: prompt };
  const messages: { role: ChatRole; content: string }[] = [];
  const tokenIds: number[] = [];
  for (const part of prompt) {
    if (typeof part === "number") tokenIds.push(part);
    else messages.push({ role: ROLES[part.role], content: part.content });
  }
  return messages.length ? { $case: "chat", value: { messages } } : { $case: "tokens", value: { tokenIds } };
}

/** A stream of responses that can be cancelled. */
export type ResponseStream = AsyncIterable<ExecuteResponse> & { cancel(): void };
type Begin = (request: DeepPartial<ExecuteRequest>, options: CallOptions) => ResponseStream;
type CancelKept = (requestId: string) => Promise<{ cancelled: boolean }>;

/**
 * The chunks of a batch, as they are generated. Iterating starts it; iterate once. Leaving the loop ends it.
 *
 * With `keepMs` the stream resumes after a lost connection or a server restart, without losing or repeating a token, and
 * fails after trying for that long. Leaving the loop then does not end the execution on the server; `cancel` does. The last
 * chunk of a failed sample has the `error`: `errorFromStatus(chunk.error)`.
 */
export class Execution implements AsyncIterable<SampleChunk> {
  /** The runtime and why it was chosen. Undefined until the first message. */
  started: ExecutionStarted | undefined;
  readonly requestId: string;
  readonly #request: DeepPartial<ExecuteRequest>;
  readonly #settings: ExecuteSettings & { proxy?: string };
  readonly #begin: Begin;
  readonly #cancelKept: CancelKept;
  // How much of each sample has been returned, by its item and index.
  readonly #positions = new Map<string, { itemId: string; sample: number; position: number }>();
  #call: ResponseStream | undefined;
  #isCancelled = false;

  /** Created by `QuireClient.execute`. `proxy`: that of the server, for messages. */
  constructor(
    items: readonly DeepPartial<ExecuteItem>[],
    settings: ExecuteSettings & { requestId: string; proxy?: string },
    begin: Begin,
    cancelKept: CancelKept,
  ) {
    const { requestId, keepMs, request } = settings;
    this.requestId = requestId;
    this.#settings = settings;
    this.#request = { ...request, items: [...items], requestId, keep: durationOf(keepMs) };
    this.#begin = begin;
    this.#cancelKept = cancelKept;
  }

  /** Throws QuireError. */
  async *[Symbol.asyncIterator](): AsyncGenerator<SampleChunk, void, void> {
    const { keepMs, timeoutMs, signal, proxy } = this.#settings;
    // The timeout is that of all attempts together.
    const deadline = timeoutMs === undefined ? undefined : Date.now() + timeoutMs;
    // When the stream broke without a chunk since then.
    let brokenAt: number | undefined;
    let longestMs = INITIAL_BACKOFF_MS;
    while (!this.#isCancelled) {
      const leftMs = deadline === undefined ? undefined : Math.max(0, deadline - Date.now());
      const request = { ...this.#request, resumeAfter: [...this.#positions.values()] };
      const call = this.#begin(request, { timeoutMs: leftMs, signal });
      this.#call = call;
      try {
        for await (const message of call) {
          // Accepting the call again is not progress: it may break before the first chunk each time.
          if (message.chunks.length) [brokenAt, longestMs] = [undefined, INITIAL_BACKOFF_MS];
          this.started = message.started ?? this.started;
          for (const chunk of message.chunks) {
            this.#took(chunk);
            yield chunk;
          }
        }
        return;
      } catch (error) {
        const failed = errorFromCall(error as ServiceError, proxy);
        // Jitter spreads the attempts of many clients.
        const pauseMs = longestMs * (0.5 + Math.random() / 2);
        brokenAt ??= Date.now();
        const until = Math.min(brokenAt + (keepMs ?? 0), deadline ?? Infinity);
        const goesOn = failed.code === status.UNAVAILABLE && !this.#isCancelled;
        if (!goesOn || Date.now() + pauseMs > until) throw failed;
        await sleep(pauseMs);
        longestMs = Math.min(2 * longestMs, MAX_BACKOFF_MS);
      } finally {
        call.cancel();
      }
    }
  }

  /** Ends the execution, also on the server, if it has not ended. If it throws QuireError, a kept one may continue. */
  async cancel(): Promise<void> {
    // Before anything is awaited: the stream may break meanwhile, and must not resume.
    this.#isCancelled = true;
    try {
      if (this.#settings.keepMs !== undefined && !(await this.#cancelKept(this.requestId)).cancelled) {
        // The request may not have reached the server yet. After its call is cancelled it has arrived or never will.
        this.#call?.cancel();
        await this.#cancelKept(this.requestId);
      }
    } finally {
      this.#call?.cancel();
    }
  }

  #took({ itemId, sample, position, tokenIds }: SampleChunk): void {
    const after = position + Math.max(1, tokenIds.length);
    this.#positions.set(`${sample} ${itemId}`, { itemId, sample, position: after });
  }
}
