/**
 * Multiplexes calls on one stream.
 *
 * Calls that are made in the same tick of the event loop are sent in one message, and so are batched. When the stream ends,
 * for any reason, every unanswered call fails with SessionEnded, and so does every later one.
 */

import { type ClientDuplexStream, type ServiceError, status } from "@grpc/grpc-js";
import { BinaryWriter } from "@bufbuild/protobuf/wire";

import { Caller, type CallName, type CallRequest, type CallResponse, OWN_REQUEST_ID } from "./cache.js";
import { bufferOf, type CallOptions } from "./connection.js";
import { durationOf } from "./duration.js";
import { cancelled, errorFromCall, errorFromStatus, QuireError, SessionEnded, tooLate } from "./errors.js";
import { SessionCall, type SessionResponse, type SessionResult } from "./gen/quire/v1/executor.js";

// Calls are split into several messages of at most this size.
const TARGET_MESSAGE_BYTES = 1 << 20;
// Below a server's default limit for one message.
const MOST_CALLS_IN_MESSAGE = 256;
// The maximum size of a protobuf field's tag and length.
const FRAME_BYTES = 6;
// Node's timers do not support longer delays.
const LONGEST_TIMER_MS = 2 ** 31 - 1;

/** The calls of one message, each an encoded SessionCall. */
export type Batch = readonly Uint8Array[];
export type SessionStream = ClientDuplexStream<Batch, SessionResponse>;

export interface SessionOptions {
  /** Further calls wait until others are answered. At least 1. */
  maxInFlight?: number;
  /** How long `close` waits for pending calls. */
  closeTimeoutMs?: number;
}

/** A call that has not been answered. */
interface OpenCall {
  tag: bigint;
  name: CallName;
  request: CallRequest<CallName>;
  /** The caller's deadline. */
  deadline: number | undefined;
  /** Settles the caller's promise, once. Undefined if the caller does not wait any more. */
  settle: ((outcome: SessionResult["result"] | QuireError) => void) | undefined;
}

/**
 * A stream of many calls. Close it. A cache that is created on a session uses it for its calls.
 *
 * Calls fail as the client's do, with three differences. They are not retried. If the stream breaks, each of its calls
 * fails. An abandoned call (its timeout passed) may still be applied; an append can be retried.
 */
export class Session extends Caller {
  readonly #stream: SessionStream;
  readonly #timeoutMs: number | undefined;
  readonly #maxRequestBytes: number;
  readonly #maxInFlight: number;
  readonly #closeTimeoutMs: number;
  // Not yet sent, because of maxInFlight or the stream's flow control.
  readonly #waiting: OpenCall[] = [];
  readonly #sent = new Map<bigint, OpenCall>();
  readonly #whenEnded: Promise<void>;
  #tellEnd!: () => void;
  #nextTag = 1n;
  #willSend = false;
  #isBlocked = false;
  #isClosing = false;
  #ended: { cause: QuireError | undefined } | undefined;

  /** Created by `QuireClient.session`. If the server is unreachable, the first call fails. */
  constructor(
    stream: SessionStream,
    settings: SessionOptions & { timeoutMs: number | undefined; maxRequestBytes: number; proxy?: string },
  ) {
    super();
    this.#stream = stream;
    this.#timeoutMs = settings.timeoutMs;
    this.#maxRequestBytes = settings.maxRequestBytes;
    this.#maxInFlight = settings.maxInFlight ?? 256;
    this.#closeTimeoutMs = settings.closeTimeoutMs ?? 10_000;
    if (!(this.#maxInFlight >= 1)) throw new RangeError(`maxInFlight must be at least 1, not ${settings.maxInFlight}`);
    this.#whenEnded = new Promise((resolve) => (this.#tellEnd = resolve));
    stream.on("data", (message: SessionResponse) => this.#answered(message));
    stream.on("error", (error: ServiceError) => this.#end(errorFromCall(error, settings.proxy)));
    stream.on("end", () => this.#end(undefined));
    stream.on("drain", () => {
      this.#isBlocked = false;
      this.#send();
    });
  }

  /** Makes a call and waits for its response. Throws QuireError; SessionEnded if the stream is closed. */
  call<Name extends CallName>(
    name: Name,
    request: CallRequest<Name>,
    options: CallOptions = {},
  ): Promise<CallResponse<Name>> {
    return new Promise((resolve, reject) => {
      if (this.#ended || this.#isClosing) throw this.#sessionEnded();
      if (options.signal?.aborted) throw cancelled();
      const timeoutMs = options.timeoutMs ?? this.#timeoutMs;
      const call: OpenCall = {
        tag: this.#nextTag++,
        name,
        request,
        deadline: timeoutMs === undefined ? undefined : Date.now() + timeoutMs,
        settle: undefined,
      };
      const size = encode(call).length;
      // The server would end the stream for all callers.
      if (size + FRAME_BYTES > this.#maxRequestBytes) throw tooLarge(size, this.#maxRequestBytes);
      const abort = () => this.#giveUp(call, cancelled());
      const timer =
        timeoutMs === undefined || timeoutMs > LONGEST_TIMER_MS
          ? undefined
          : setTimeout(() => this.#giveUp(call, tooLate(timeoutMs)), timeoutMs);
      options.signal?.addEventListener("abort", abort);
      call.settle = (outcome) => {
        call.settle = undefined;
        clearTimeout(timer);
        options.signal?.removeEventListener("abort", abort);
        if (outcome instanceof QuireError) reject(outcome);
        else if (outcome?.$case === "error") reject(errorFromStatus(outcome.value));
        else if (outcome?.$case === name) resolve(outcome.value as never);
        else reject(new QuireError(status.INTERNAL, `${name} was answered with ${outcome?.$case}`));
      };
      this.#enqueue(call);
    });
  }

  /** Refuses further calls, waits for those in flight for a limited time, and ends the stream. */
  async close(): Promise<void> {
    this.#isClosing = true;
    this.#endIfDone();
    const timer = setTimeout(() => this.cancel(), this.#closeTimeoutMs);
    await this.#whenEnded;
    clearTimeout(timer);
  }

  /** Ends the stream immediately. Unanswered calls fail with SessionEnded. */
  cancel(): void {
    this.#stream.cancel();
  }

  #enqueue(call: OpenCall): void {
    this.#waiting.push(call);
    if (this.#willSend) return;
    this.#willSend = true;
    setImmediate(() => {
      this.#willSend = false;
      this.#send();
    });
  }

  /** Sends waiting calls, limited by maxInFlight and the stream's flow control. */
  #send(): void {
    while (!this.#ended && !this.#isBlocked && this.#waiting.length && this.#sent.size < this.#maxInFlight) {
      const batch: Uint8Array[] = [];
      let bytes = 0;
      const room = Math.min(MOST_CALLS_IN_MESSAGE, this.#maxInFlight - this.#sent.size);
      const limit = Math.min(TARGET_MESSAGE_BYTES, this.#maxRequestBytes);
      let taken = 0;
      for (const call of this.#waiting.slice(0, room)) {
        const encoded = encode(call);
        if (batch.length && bytes + encoded.length + FRAME_BYTES > limit) break;
        batch.push(encoded);
        bytes += encoded.length + FRAME_BYTES;
        this.#sent.set(call.tag, call);
        taken++;
      }
      this.#waiting.splice(0, taken);
      this.#isBlocked = !this.#stream.write(batch);
    }
  }

  #answered(message: SessionResponse): void {
    for (const { tag, result } of message.results) {
      const call = this.#sent.get(tag);
      if (!call) continue;
      this.#sent.delete(tag);
      if (call.settle) call.settle(result);
      else this.#disown(call, result);
    }
    this.#send();
    this.#endIfDone();
  }

  /** The caller stops waiting. If the call was sent, it may be applied, and its result is discarded. */
  #giveUp(call: OpenCall, error: QuireError): void {
    const index = this.#waiting.indexOf(call);
    if (index >= 0) this.#waiting.splice(index, 1);
    call.settle?.(error);
    this.#endIfDone();
  }

  /** Releases the caches that an abandoned call created, because its caller does not get their ids. */
  #disown(call: OpenCall, result: SessionResult["result"]): void {
    if (this.#ended) return;
    for (const cacheId of newCaches(call, result)) {
      this.#enqueue({
        tag: this.#nextTag++,
        name: "releaseCache",
        request: { cacheId },
        deadline: undefined,
        settle: () => undefined,
      });
    }
  }

  #endIfDone(): void {
    if (this.#isClosing && !this.#ended && !this.#sent.size && !this.#waiting.length) this.#stream.end();
  }

  #end(cause: QuireError | undefined): void {
    if (this.#ended) return;
    this.#ended = { cause };
    const open = [...this.#sent.values(), ...this.#waiting.splice(0)];
    this.#sent.clear();
    // Each caller gets its own error.
    for (const call of open) call.settle?.(this.#sessionEnded());
    this.#tellEnd();
  }

  #sessionEnded(): SessionEnded {
    const cause = this.#ended?.cause;
    if (!cause) return new SessionEnded(status.UNAVAILABLE, "the session is closed");
    const { reason, metadata, retryDelayMs } = cause;
    const facts = { reason, metadata, retryDelayMs, cause };
    return new SessionEnded(status.UNAVAILABLE, `the session has ended: ${cause.message}`, facts);
  }
}

/** Encodes a SessionRequest. */
export function serializeBatch(batch: Batch): Buffer {
  const writer = new BinaryWriter();
  for (const call of batch) writer.uint32((1 << 3) | 2).bytes(call);
  return bufferOf(writer.finish());
}

/** Encodes a SessionCall with the remaining timeout. */
function encode(call: OpenCall): Uint8Array {
  const leftMs = call.deadline === undefined ? undefined : Math.max(1, call.deadline - Date.now());
  const message = SessionCall.fromPartial({
    tag: call.tag,
    call: { $case: call.name, value: call.request } as any,
    timeout: durationOf(leftMs),
  });
  return SessionCall.encode(message).finish();
}

/** Ids of the caches that a call made and that the caller can learn only from its response. */
function newCaches(call: OpenCall, result: SessionResult["result"]): string[] {
  const request = call.request as { requestId?: string; cacheId?: string };
  // A caller that chose the request id can retry to get the caches.
  const isForgotten = !request.requestId || request.requestId.startsWith(OWN_REQUEST_ID);
  if (!isForgotten) return [];
  if (result?.$case === "prefill" && !request.cacheId) return [result.value.kvCache!.cacheId];
  if (result?.$case === "forkCache") return result.value.kvCaches.map((handle) => handle.cacheId);
  if (result?.$case === "forkCaches") {
    return result.value.results.flatMap((forked) => forked.kvCaches.map((handle) => handle.cacheId));
  }
  return [];
}

function tooLarge(size: number, limit: number): QuireError {
  return new QuireError(
    status.RESOURCE_EXHAUSTED,
    `a request of ${size} bytes is too large for messages of ${limit}`,
  );
}
