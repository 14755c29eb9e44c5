/** Whole texts: what `execute` returns. */

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

// Between two tries to go on, at first and at most.
const FIRST_PAUSE_MS = 100;
const LONGEST_PAUSE_MS = 2000;

const ROLES = {
  system: ChatRole.CHAT_ROLE_SYSTEM,
  user: ChatRole.CHAT_ROLE_USER,
  assistant: ChatRole.CHAT_ROLE_ASSISTANT,
  tool: ChatRole.CHAT_ROLE_TOOL,
};

/** A text that is continued, token ids, or messages written as the model's chat template says. */
export type Prompt = string | readonly number[] | readonly { role: keyof typeof ROLES; content: string }[];

export interface ExecuteSettings extends CallOptions {
  /** With which it can be asked for again, or cancelled. Empty: one is made. */
  requestId?: string;
  /** How long the server keeps it without its reader. It then goes on by itself where a connection is lost. */
  keepMs?: number;
  /** Further fields of ExecuteRequest: runtime, policy, maxCostUsd, priority. */
  request?: Omit<DeepPartial<ExecuteRequest>, "items" | "requestId" | "keep" | "resumeAfter">;
}

/** An item for `execute`, with further fields of ExecuteItem, such as maxTokens, sampling, stop, n, constraint. */
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

/** A stream of answers that can be cancelled. */
export type ResponseStream = AsyncIterable<ExecuteResponse> & { cancel(): void };

/**
 * The chunks of a batch, as they come. It begins when it is iterated over; iterate once. Leaving the loop ends it.
 *
 * With `keepMs` it goes on by itself, without a token lost or said twice, where a connection was lost or the server
 * started again, and gives up when it could not for that long; leaving the loop does not end it on the server then,
 * `cancel` does. A sample that fails says so in the `error` of its last chunk: `errorFromStatus(chunk.error)`.
 */
export class Execution implements AsyncIterable<SampleChunk> {
  /** Which runtime was taken, and why. Undefined until the first message has come. */
  started: ExecutionStarted | undefined;
  readonly requestId: string;
  readonly #request: DeepPartial<ExecuteRequest>;
  readonly #keepMs: number | undefined;
  readonly #begin: (request: DeepPartial<ExecuteRequest>) => ResponseStream;
  readonly #cancelKept: (requestId: string) => Promise<unknown>;
  // How much of each sample has been handed out, by its item and number.
  readonly #positions = new Map<string, { itemId: string; sample: number; position: number }>();
  #call: ResponseStream | undefined;
  #isCancelled = false;

  /** Made by `QuireClient.execute`. */
  constructor(
    items: readonly DeepPartial<ExecuteItem>[],
    settings: ExecuteSettings & { requestId: string },
    begin: (request: DeepPartial<ExecuteRequest>) => ResponseStream,
    cancelKept: (requestId: string) => Promise<unknown>,
  ) {
    const { requestId, keepMs, request } = settings;
    this.requestId = requestId;
    this.#keepMs = keepMs;
    this.#request = { ...request, items: [...items], requestId, keep: durationOf(keepMs) };
    this.#begin = begin;
    this.#cancelKept = cancelKept;
  }

  /** Throws QuireError. */
  async *[Symbol.asyncIterator](): AsyncGenerator<SampleChunk, void, void> {
    let heardAt = Date.now();
    let longestMs = FIRST_PAUSE_MS;
    while (!this.#isCancelled) {
      const call = this.#begin({ ...this.#request, resumeAfter: [...this.#positions.values()] });
      this.#call = call;
      try {
        for await (const message of call) {
          // That it was accepted once more is not enough: it may break off there each time.
          if (message.chunks.length) [heardAt, longestMs] = [Date.now(), FIRST_PAUSE_MS];
          this.started = message.started ?? this.started;
          for (const chunk of message.chunks) {
            this.#took(chunk);
            yield chunk;
          }
        }
        return;
      } catch (error) {
        const failed = errorFromCall(error as ServiceError);
        // Not all come again at once.
        const pauseMs = longestMs * (0.5 + Math.random() / 2);
        const goesOn = failed.code === status.UNAVAILABLE && this.#keepMs !== undefined && !this.#isCancelled;
        if (!goesOn || Date.now() + pauseMs > heardAt + this.#keepMs!) throw failed;
        await sleep(pauseMs);
        longestMs = Math.min(2 * longestMs, LONGEST_PAUSE_MS);
      } finally {
        call.cancel();
      }
    }
  }

  /** Ends it, on the server too. Nothing happens if it has ended. Throws QuireError: a kept one may go on. */
  async cancel(): Promise<void> {
    if (this.#keepMs !== undefined) await this.#cancelKept(this.requestId);
    this.#isCancelled = true;
    this.#call?.cancel();
  }

  #took({ itemId, sample, position, tokenIds }: SampleChunk): void {
    const after = position + Math.max(1, tokenIds.length);
    this.#positions.set(`${sample} ${itemId}`, { itemId, sample, position: after });
  }
}
