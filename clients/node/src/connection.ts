/** A connection, its unary calls, and which of them are safe to retry. */

import { setTimeout as sleep } from "node:timers/promises";

import { type CallOptions as GrpcCallOptions, Client, type ChannelCredentials, Metadata, status } from "@grpc/grpc-js";

import { cancelled, errorFromCall, errorFromStatus, QuireError } from "./errors.js";
import type { DeepPartial } from "./gen/quire/v1/executor.js";
import { channelOptions, proxyOf } from "./proxies.js";

const INITIAL_BACKOFF_MS = 100;
const MAX_BACKOFF_MS = 2000;
const BACKOFF_MULTIPLIER = 3;
const MAX_ATTEMPTS = 4;
// If the server asks for a longer delay, the call fails at once.
const MAX_SERVER_DELAY_MS = 60_000;

/** The generated codec of a message. */
export interface Message<T> {
  encode(message: T): { finish(): Uint8Array };
  decode(bytes: Uint8Array): T;
  fromPartial(object: DeepPartial<T>): T;
}

/** The generated definition of a call. */
export interface Method {
  readonly name: string;
  readonly requestType: Message<any>;
  readonly responseType: Message<any>;
  readonly requestStream: boolean;
  readonly responseStream: boolean;
}

export interface Service {
  readonly fullName: string;
  readonly methods: Readonly<Record<string, Method>>;
}

export type RequestOf<M extends Method> = DeepPartial<ReturnType<M["requestType"]["decode"]>>;
export type ResponseOf<M extends Method> = ReturnType<M["responseType"]["decode"]>;

export interface CallOptions {
  /** The timeout of the call, including retries. Undefined: the client's. */
  timeoutMs?: number | undefined;
  /** Cancels the call. An append may still have been applied. */
  signal?: AbortSignal | undefined;
}

/** The unary calls of a service, as functions. They throw QuireError. */
export type UnaryCalls<S extends Service> = {
  readonly [
    Name in keyof S["methods"] as S["methods"][Name] extends { requestStream: false; responseStream: false } ? Name
      : never
  ]: (request?: RequestOf<S["methods"][Name]>, options?: CallOptions) => Promise<ResponseOf<S["methods"][Name]>>;
};

export class Connection {
  /** For messages: that of the target. */
  readonly proxy: string;
  readonly #client: Client;
  readonly #metadata: Metadata;
  readonly #timeoutMs: number | undefined;

  constructor(
    target: string,
    credentials: ChannelCredentials,
    settings: {
      metadata: Metadata;
      timeoutMs: number | undefined;
      maxRequestBytes: number;
      maxResponseBytes: number;
      serverName: string | undefined;
    },
  ) {
    this.proxy = proxyOf(target);
    this.#client = new Client(target, credentials, {
      ...channelOptions(target),
      "grpc.max_send_message_length": settings.maxRequestBytes,
      "grpc.max_receive_message_length": settings.maxResponseBytes,
      "grpc.initial_reconnect_backoff_ms": INITIAL_BACKOFF_MS,
      "grpc.max_reconnect_backoff_ms": MAX_BACKOFF_MS,
      ...(settings.serverName === undefined ? {} : { "grpc.ssl_target_name_override": settings.serverName }),
    });
    this.#metadata = settings.metadata;
    this.#timeoutMs = settings.timeoutMs;
  }

  /** The unary calls of a service. */
  calls<S extends Service>(service: S): UnaryCalls<S> {
    const unary = Object.entries(service.methods).filter(([, method]) => !method.requestStream && !method.responseStream);
    const functions = unary.map(([name, method]) => [
      name,
      (request: unknown = {}, options: CallOptions = {}) => this.#call(service, name, method, request, options),
    ]);
    return Object.freeze(Object.fromEntries(functions)) as UnaryCalls<S>;
  }

  /** Starts a server-streaming call. Returns a Readable, which fails with grpc-js's ServiceError. */
  serverStream<M extends Method>(service: Service, method: M, request: RequestOf<M>, options: CallOptions) {
    const message = method.requestType.fromPartial(request);
    const call = this.#client.makeServerStreamRequest<any, ResponseOf<M>>(
      pathOf(service, method),
      (value) => bufferOf(method.requestType.encode(value).finish()),
      method.responseType.decode,
      message,
      this.#metadata,
      this.#grpcOptions(this.#deadlineOf(options)),
    );
    // Ignore the error of a cancellation after the reader has left.
    call.on("error", () => undefined);
    const abort = () => call.cancel();
    options.signal?.addEventListener("abort", abort);
    call.on("close", () => options.signal?.removeEventListener("abort", abort));
    if (options.signal?.aborted) abort();
    return call;
  }

  /** Starts a bidirectional stream, whose requests `serialize` encodes. It has no deadline. */
  bothStreams<Request, M extends Method>(service: Service, method: M, serialize: (request: Request) => Buffer) {
    return this.#client.makeBidiStreamRequest<Request, ResponseOf<M>>(
      pathOf(service, method),
      serialize,
      method.responseType.decode,
      this.#metadata,
    );
  }

  /** Waits until the server is reachable. Throws QuireError after the timeout. */
  async ready(timeoutMs: number): Promise<void> {
    await new Promise<void>((resolve, reject) => {
      this.#client.waitForReady(Date.now() + timeoutMs, (error) => {
        const through = this.proxy && ` (through the proxy ${this.proxy})`;
        if (error) reject(new QuireError(status.UNAVAILABLE, error.message + through, { cause: error }));
        else resolve();
      });
    });
  }

  close(): void {
    this.#client.close();
  }

  async #call(service: Service, name: string, method: Method, request: any, options: CallOptions): Promise<any> {
    const message = method.requestType.fromPartial(request);
    const deadline = this.#deadlineOf(options);
    const maxAttempts = mayRepeat(name, message) ? MAX_ATTEMPTS : 1;
    for (let attempt = 1, longestMs = INITIAL_BACKOFF_MS; ; attempt++) {
      let answer: any;
      const failed: QuireError | undefined = await this.#attempt(service, method, message, deadline, options.signal)
        .then((found) => failedItem((answer = found)), (error) => error);
      if (!failed) return answer;
      // Jitter spreads the retries of many clients. The server's delay is the minimum.
      const serverDelayMs = failed.retryDelayMs ?? 0;
      const pauseMs = Math.max(longestMs * (0.5 + Math.random() / 2), serverDelayMs);
      const isLate = deadline !== undefined && Date.now() + pauseMs >= deadline;
      // Without a reason it is not the gateway's, but of gRPC: one that stops drops calls that wait there.
      const isDropped = failed.code === status.CANCELLED && !failed.reason && !options.signal?.aborted;
      const isGone = isDropped || failed.code === status.UNAVAILABLE;
      if (!isGone || attempt === maxAttempts || isLate || serverDelayMs > MAX_SERVER_DELAY_MS) {
        if (answer) return answer; // What the other items are answered.
        throw failed;
      }
      await sleep(pauseMs, undefined, options.signal && { signal: options.signal }).catch(() => {
        throw cancelled();
      });
      longestMs = Math.min(longestMs * BACKOFF_MULTIPLIER, MAX_BACKOFF_MS);
    }
  }

  #attempt(
    service: Service,
    method: Method,
    message: unknown,
    deadline: number | undefined,
    signal: AbortSignal | undefined,
  ): Promise<unknown> {
    return new Promise((resolve, reject) => {
      if (signal?.aborted) return reject(cancelled());
      const abort = () => call.cancel();
      const call = this.#client.makeUnaryRequest(
        pathOf(service, method),
        (value: unknown) => bufferOf(method.requestType.encode(value).finish()),
        method.responseType.decode,
        message,
        this.#metadata,
        this.#grpcOptions(deadline),
        (error, response) => {
          signal?.removeEventListener("abort", abort);
          if (error) reject(errorFromCall(error, this.proxy));
          else resolve(response);
        },
      );
      signal?.addEventListener("abort", abort);
    });
  }

  #deadlineOf(options: CallOptions): number | undefined {
    const timeoutMs = options.timeoutMs ?? this.#timeoutMs;
    return timeoutMs === undefined ? undefined : Date.now() + timeoutMs;
  }

  #grpcOptions(deadline: number | undefined): GrpcCallOptions {
    return deadline === undefined ? {} : { deadline };
  }
}

/** Converts bytes to the type of grpc-js without a copy. */
export function bufferOf(bytes: Uint8Array): Buffer {
  return Buffer.from(bytes.buffer, bytes.byteOffset, bytes.byteLength);
}

function pathOf(service: Service, method: Method): string {
  return `/${service.fullName}/${method.name}`;
}

/** The fields that the append requests share. */
interface Append {
  cacheId: string;
  position?: number | undefined;
  requestId?: string;
}

/** The error of an item of a batch whose gateway was away. Items that were applied are not applied again. */
function failedItem(answer: any): QuireError | undefined {
  const isAway = ({ result }: any) => result?.$case === "error" && result.value.code === status.UNAVAILABLE;
  const item = answer.results?.find(isAway);
  return item && errorFromStatus(item.result.value);
}

/** Whether a request is safe to retry: it is read-only, fenced, has a request id, or is idempotent. */
function mayRepeat(name: string, request: any): boolean {
  switch (name) {
    case "prefill":
    case "decode":
    case "forwardVerify":
      return isFenced(request);
    case "batchPrefill":
    case "batchDecode":
    case "unifiedForward":
      return request.items.every(isFenced);
    case "forkCache":
    case "forkCaches":
      return request.requestId !== "";
    case "drain":
    case "shutdown":
    case "rebuildSession":
      return false;
    default:
      return true;
  }
}

function isFenced(append: Append): boolean {
  return append.cacheId ? append.position !== undefined : Boolean(append.requestId);
}
