/** Streams of generated text, which `execute` returns. */

import { setTimeout as sleep } from "node:timers/promises";

import { create } from "@bufbuild/protobuf";
import type { ServiceError } from "@grpc/grpc-js";

import { Answer, type Chunk, chunkOf } from "./chunks.js";
import { type CallOptions, onAbort } from "./connection.js";
import { deadlineOf, msOf } from "./duration.js";
import type { Policy } from "./enums.js";
import { cancelled, errorFromCall, isConnectionError, QuireError } from "./errors.js";
import {
  type ExecuteRequest,
  type ExecuteResponse,
  type ExecutionStarted,
  type SampleChunk,
  type SampleProgress,
  SampleProgressSchema,
} from "./gen/quire/v1/runner_pb.js";

// The delay between two attempts to resume: the first, and the maximum.
const INITIAL_BACKOFF_MS = 100;
const MAX_BACKOFF_MS = 2000;

export interface ExecuteSettings extends CallOptions {
  /** The name of a runtime. Undefined: the server chooses one by `policy`. */
  runtime?: string;
  /** How the server chooses: "order", "local_first" or "cheapest". Undefined: as it is configured. */
  policy?: Policy;
  /** The key to resume or cancel the execution with. Undefined: one is generated. */
  requestId?: string;
  /** How long the server keeps the execution without a reader. The stream then resumes after a lost connection. */
  keepMs?: number;
  /** The maximum cost of all items together. */
  maxCostUsd?: number;
  /** Throw the error of a sample that fails, which ends all. False: its last chunk has the error, and others go on. */
  raiseOnError?: boolean;
}

/** How a client reads an execution. */
export interface ExecutionOptions extends Pick<ExecuteSettings, "timeoutMs" | "signal" | "raiseOnError"> {
  /** False: it does not resume. */
  retries?: boolean;
}

/** A stream of responses that can be cancelled. */
export type ResponseStream = AsyncIterable<ExecuteResponse> & { cancel(): void };
/** Starts the call. `proxy`: that of its target, for messages. */
type Begin = (request: ExecuteRequest, options: CallOptions) => { call: ResponseStream; proxy: string };
type CancelKept = (requestId: string) => Promise<boolean>;

/**
 * The chunks of a batch, as they are generated. Iterating starts it; iterate once. Leaving the loop ends it.
 *
 * With `keepMs` the stream resumes after a lost connection or a server restart, without losing or repeating a token, and
 * fails after trying for that long. Leaving the loop then does not end the execution on the server; `cancel` does. The error
 * of a sample that fails is thrown, and ends it, unless `raiseOnError` is false.
 */
export class Execution implements AsyncIterable<Chunk>, AsyncDisposable {
  /** The runtime and why it was chosen. Undefined until the first message. */
  started: ExecutionStarted | undefined;
  /** The key to resume or cancel it with. */
  readonly requestId: string;
  readonly #request: ExecuteRequest;
  readonly #settings: ExecutionOptions;
  // How long the server keeps it, and this client tries to resume it. 0: not.
  readonly #keepMs: number;
  readonly #begin: Begin;
  readonly #cancelKept: CancelKept;
  // How much of each sample has been returned, by its item and index.
  readonly #positions = new Map<string, SampleProgress>();
  #call: ResponseStream | undefined;
  // Aborted when it is cancelled, also in the pause before it resumes.
  readonly #cancelled = new AbortController();

  /** Created by `QuireClient.execute`. Mutates the request, which has a requestId, when it resumes. */
  constructor(request: ExecuteRequest, settings: ExecutionOptions, begin: Begin, cancelKept: CancelKept) {
    this.requestId = request.requestId;
    this.#request = request;
    this.#settings = settings;
    this.#keepMs = msOf(request.keep) ?? 0;
    this.#begin = begin;
    this.#cancelKept = cancelKept;
  }

  /** Throws QuireError. */
  async *[Symbol.asyncIterator](): AsyncGenerator<Chunk, void, void> {
    const { timeoutMs, signal, retries = true, raiseOnError = true } = this.#settings;
    // The timeout is that of all attempts together.
    const deadline = deadlineOf(timeoutMs);
    // When the stream broke without a chunk since then.
    let brokenAt: number | undefined;
    let longestMs = INITIAL_BACKOFF_MS;
    for (;;) {
      if (this.#cancelled.signal.aborted) throw cancelled();
      const leftMs = deadline === undefined ? Infinity : Math.max(0, deadline - Date.now());
      this.#request.resumeAfter = [...this.#positions.values()];
      const { call, proxy } = this.#begin(this.#request, { timeoutMs: leftMs, signal });
      this.#call = call;
      try {
        for await (const message of call) {
          // Accepting the call again is not progress: it may break before the first chunk each time.
          if (message.chunks.length) [brokenAt, longestMs] = [undefined, INITIAL_BACKOFF_MS];
          this.started = message.started ?? this.started;
          for (const part of message.chunks) {
            this.#took(part);
            const chunk = chunkOf(part);
            if (chunk.error && raiseOnError) throw chunk.error;
            yield chunk;
          }
        }
        return;
      } catch (error) {
        if (error instanceof QuireError) throw error; // Of a sample.
        const failed = errorFromCall(error as ServiceError, proxy);
        // Jitter spreads the attempts of many clients.
        const pauseMs = longestMs * (0.5 + Math.random() / 2);
        brokenAt ??= Date.now();
        const until = Math.min(brokenAt + this.#keepMs, deadline ?? Infinity);
        const goesOn = isConnectionError(failed, signal) && retries && !this.#cancelled.signal.aborted;
        if (!goesOn || Date.now() + pauseMs > until) throw failed;
        const forget = onAbort(signal, () => this.#cancelled.abort());
        if (signal?.aborted) this.#cancelled.abort();
        await sleep(pauseMs, undefined, { signal: this.#cancelled.signal })
          .catch(() => {
            throw cancelled();
          })
          .finally(forget);
        longestMs = Math.min(2 * longestMs, MAX_BACKOFF_MS);
      } finally {
        call.cancel();
      }
    }
  }

  /** How many samples its items have. */
  get numTexts(): number {
    return this.#request.items.reduce((sum, { n }) => sum + Math.max(1, n), 0);
  }

  /** Waits for all, and returns the text of each sample, item by item. Throws QuireError. */
  async texts(): Promise<string[]> {
    return (await this.answers()).map(({ text }) => text);
  }

  /** Waits for all, and returns each sample with its thoughts and tool calls. Throws QuireError. */
  async answers(): Promise<Answer[]> {
    const answers = new Map<string, Answer>();
    for (const { itemId, n } of this.#request.items) {
      for (let sample = 0; sample < Math.max(1, n); sample++) answers.set(`${sample} ${itemId}`, new Answer(itemId, sample));
    }
    for await (const chunk of this) answers.get(`${chunk.sample} ${chunk.itemId}`)?.add(chunk);
    return [...answers.values()];
  }

  /** Ends the execution, also on the server, if it has not ended. If it throws QuireError, a kept one may continue. */
  async cancel(): Promise<void> {
    // Before anything is awaited: the stream may break meanwhile, and must not resume.
    this.#cancelled.abort();
    try {
      if (this.#keepMs && !(await this.#cancelKept(this.requestId))) {
        // The request may not have reached the server yet. After its call is cancelled it has arrived or never will.
        this.#call?.cancel();
        await this.#cancelKept(this.requestId);
      }
    } finally {
      this.#call?.cancel();
    }
  }

  /** Ends it as leaving the loop does: one that is kept goes on. */
  async [Symbol.asyncDispose](): Promise<void> {
    this.#cancelled.abort();
    this.#call?.cancel();
  }

  #took({ itemId, sample, position, tokenIds }: SampleChunk): void {
    const after = position + Math.max(1, tokenIds.length);
    this.#positions.set(`${sample} ${itemId}`, create(SampleProgressSchema, { itemId, sample, position: after }));
  }
}
