/**
 * Multiplexes calls on one stream.
 *
 * Calls that are made in the same tick of the event loop are sent in one message, and so are batched. When the stream ends,
 * for any reason, every unanswered call fails with SessionEnded, and so does every later one.
 */

import { type DescMessage, toBinary } from "@bufbuild/protobuf";
import { DurationSchema } from "@bufbuild/protobuf/wkt";
import { BinaryWriter, WireType } from "@bufbuild/protobuf/wire";
import { type ClientDuplexStream, type ServiceError, status } from "@grpc/grpc-js";

import { newCaches } from "./batches.js";
import { Caller } from "./cache.js";
import { bufferOf, type CallOptions, checkOptions, onAbort } from "./connection.js";
import { deadlineOf, durationOf, timerOf } from "./duration.js";
import type { Priority } from "./enums.js";
import {
  cancelled,
  errorFromCall,
  errorFromStatus,
  InternalError,
  QuireError,
  ResourceExhausted,
  SessionEnded,
  tooLate,
} from "./errors.js";
import {
  ModelExecutorService,
  SessionCallSchema,
  SessionRequestSchema,
  type SessionResponse,
  type SessionResult,
} from "./gen/quire/v1/executor_pb.js";
import { messageOf, type Method, type Request, type Response } from "./methods.js";

// Calls are split into several messages of at most this size.
const TARGET_MESSAGE_BYTES = 1 << 20;
// Below a server's default limit for one message.
const MOST_CALLS_IN_MESSAGE = 256;
// The maximum size of a protobuf field's tag and length.
const FRAME_BYTES = 6;
// The maximum size that a message of one call adds to its request: two fields around it, the call's tag, and its timeout.
const CALL_OVERHEAD_BYTES = 2 * FRAME_BYTES + 11 + 20;
// The fields of SessionCall by the type of their request.
const FIELDS = new Map(
  SessionCallSchema.oneofs[0]!.fields.map(({ message, number, localName }) => [message!.typeName, { number, name: localName }]),
);
const TAG_FIELD = SessionCallSchema.field.tag.number;
const TIMEOUT_FIELD = SessionCallSchema.field.timeout.number;
const CALLS_FIELD = SessionRequestSchema.field.calls.number;

/** A stream of encoded SessionRequests. */
export type SessionStream = ClientDuplexStream<Buffer, SessionResponse>;

export interface SessionOptions {
  /** Further calls wait until others are answered. At least 1. */
  maxInFlight?: number;
  /** How long `close` waits for pending calls. */
  closeTimeoutMs?: number;
}

/** A call that has not been answered. */
interface OpenCall {
  tag: bigint;
  /** That of its request in SessionCall, and of its response in SessionResult. */
  field: { number: number; name: string };
  request: object;
  encoded: Uint8Array;
  /** The caller's deadline. */
  deadline: number | undefined;
  /** Settles the caller's promise, once. Undefined if the caller does not wait any more. */
  settle: ((outcome: SessionResult["result"] | QuireError) => void) | undefined;
}

/**
 * A stream of many calls. Close it. A cache that is created on a session uses it for its calls.
 *
 * Calls fail as the client's do, with three differences. They are not retried. If the stream breaks, each of its calls
 * fails. An abandoned call (its timeout passed) may still be applied: retry an append, or undo it with `truncate` to `seqLen`.
 */
export class Session extends Caller implements AsyncDisposable {
  readonly #stream: SessionStream;
  readonly #timeoutMs: number | undefined;
  readonly #priority: Priority | undefined;
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
    settings: SessionOptions & {
      timeoutMs: number | undefined;
      priority?: Priority | undefined;
      maxRequestBytes: number;
      proxy?: string;
    },
  ) {
    super();
    this.#stream = stream;
    this.#timeoutMs = settings.timeoutMs;
    this.#priority = settings.priority;
    this.#maxRequestBytes = settings.maxRequestBytes;
    this.#maxInFlight = settings.maxInFlight ?? 256;
    this.#closeTimeoutMs = settings.closeTimeoutMs ?? 10_000;
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
  async call<I extends DescMessage, O extends DescMessage>(
    method: Method<I, O>,
    request: Request<I>,
    options: CallOptions = {},
  ): Promise<Response<O>> {
    checkOptions(method, options);
    if (this.#ended || this.#isClosing) throw this.#sessionEnded();
    if (options.signal?.aborted) throw cancelled();
    const field = FIELDS.get(method.input.typeName);
    if (!field) throw new TypeError(`${method.name} is no call of a session: make it on the client`);
    const message = messageOf(method.input, request, options.priority ?? this.#priority);
    const encoded = toBinary(method.input, message);
    if (encoded.length + CALL_OVERHEAD_BYTES > this.#maxRequestBytes) {
      // The server would end the stream for all callers.
      throw tooLarge(encoded.length, this.#maxRequestBytes);
    }
    return (await this.#result(field, message, encoded, options)) as Response<O>;
  }

  #result(field: OpenCall["field"], request: object, encoded: Uint8Array, options: CallOptions): Promise<unknown> {
    return new Promise((resolve, reject) => {
      const timeoutMs = options.timeoutMs ?? this.#timeoutMs;
      const deadline = deadlineOf(timeoutMs);
      const call: OpenCall = { tag: this.#nextTag++, field, request, encoded, deadline, settle: undefined };
      const forget = onAbort(options.signal, () => this.#giveUp(call, cancelled()));
      const timer = timerOf(timeoutMs, () => this.#giveUp(call, tooLate(timeoutMs!)));
      call.settle = (outcome) => {
        call.settle = undefined;
        clearTimeout(timer);
        forget();
        if (outcome instanceof QuireError) reject(outcome);
        else if (outcome?.case === "error") reject(errorFromStatus(outcome.value));
        else if (outcome?.case === field.name) resolve(outcome.value);
        else reject(new InternalError(status.INTERNAL, `${field.name} was answered with ${outcome?.case}`));
      };
      this.#enqueue(call);
    });
  }

  /** Refuses further calls, waits for those in flight for a limited time, and ends the stream. */
  async close(): Promise<void> {
    this.#isClosing = true;
    this.#endIfDone();
    const timer = timerOf(this.#closeTimeoutMs, () => this.cancel());
    await this.#whenEnded;
    clearTimeout(timer);
  }

  async [Symbol.asyncDispose](): Promise<void> {
    await this.close();
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
      const message = new BinaryWriter();
      const room = Math.min(MOST_CALLS_IN_MESSAGE, this.#maxInFlight - this.#sent.size);
      const limit = Math.min(TARGET_MESSAGE_BYTES, this.#maxRequestBytes);
      let [taken, bytes] = [0, 0];
      for (const call of this.#waiting.slice(0, room)) {
        bytes += call.encoded.length + CALL_OVERHEAD_BYTES;
        if (taken && bytes > limit) break;
        message.tag(CALLS_FIELD, WireType.LengthDelimited).bytes(encode(call));
        this.#sent.set(call.tag, call);
        taken++;
      }
      this.#waiting.splice(0, taken);
      this.#isBlocked = !this.#stream.write(bufferOf(message.finish()));
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
    if (this.#ended || !result.value) return;
    const { input } = ModelExecutorService.method.releaseCache;
    for (const cacheId of newCaches(call.request, result.value)) {
      const request = messageOf(input, { cacheId }, undefined);
      this.#enqueue({
        tag: this.#nextTag++,
        field: FIELDS.get(input.typeName)!,
        request,
        encoded: toBinary(input, request),
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

/** Encodes a SessionCall with the remaining timeout. Its request is encoded already. */
function encode({ tag, field, encoded, deadline }: OpenCall): Uint8Array {
  const writer = new BinaryWriter();
  writer.tag(TAG_FIELD, WireType.Varint).uint64(tag);
  writer.tag(field.number, WireType.LengthDelimited).bytes(encoded);
  if (deadline !== undefined) {
    const left = durationOf(Math.max(1, deadline - Date.now()))!;
    writer.tag(TIMEOUT_FIELD, WireType.LengthDelimited).bytes(toBinary(DurationSchema, left));
  }
  return writer.finish();
}

function tooLarge(size: number, limit: number): QuireError {
  const message = `a request of ${size} bytes is too large for messages of ${limit}`;
  return new ResourceExhausted(status.RESOURCE_EXHAUSTED, message);
}
