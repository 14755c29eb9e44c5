/** The channels to one or several gateways, and the attempts of each call. */

import { setMaxListeners } from "node:events";
import { setTimeout as sleep } from "node:timers/promises";

import {
  create,
  type DescMessage,
  type DescMethodServerStreaming,
  fromBinary,
  toBinary,
} from "@bufbuild/protobuf";
import {
  type CallOptions as GrpcCallOptions,
  type ChannelCredentials,
  Client,
  type ClientUnaryCall,
  connectivityState,
  type Metadata,
  status,
} from "@grpc/grpc-js";

import { ownRequestIds } from "./batches.js";
import { deadlineOf } from "./duration.js";
import type { Priority } from "./enums.js";
import { cancelled, errorFromCall, errorFromStatus, isConnectionError, QuireError, Unavailable } from "./errors.js";
import { Gateways } from "./gateways.js";
import type { Status } from "./gen/google/rpc/status_pb.js";
import { ModelExecutorService } from "./gen/quire/v1/executor_pb.js";
import { mayRepeat, type Method, refuse, type Request, type Response } from "./methods.js";
import { channelOptions, proxyOf } from "./proxies.js";

const INITIAL_BACKOFF_MS = 100;
const MAX_BACKOFF_MS = 2000;
const BACKOFF_MULTIPLIER = 3;
const MAX_ATTEMPTS = 4;
// With several gateways: until another one has taken over.
const MAX_ATTEMPTS_OF_SEVERAL = 16;
// One of several gateways that does not even accept a connection in this time is away. grpc-js has no limit of its own.
const CONNECT_TIMEOUT_MS = 5000;
const READY_TURN_MS = 1000;
// How long the release after an abandoned call may take.
const RELEASE_TIMEOUT_MS = 1000;
const RELEASE_CACHE = ModelExecutorService.method.releaseCache;
// If the server asks for a longer delay, the call fails at once.
const MAX_SERVER_DELAY_MS = 60_000;

export interface CallOptions {
  /** The timeout of the call, including retries. Undefined: the client's. */
  timeoutMs?: number | undefined;
  /** How it is scheduled under load, if it appends to caches or scores. Undefined: the client's. */
  priority?: Priority | undefined;
  /** Cancels the call. An append may still have been applied. */
  signal?: AbortSignal | undefined;
}

/** Throws TypeError for other names. */
export function checkOptions({ name }: { name: string }, { timeoutMs, priority, signal, ...unknown }: CallOptions): void {
  refuse(name, unknown);
}

/** Calls `abort` when a signal is given, until the function that is returned is called. */
export function onAbort(signal: AbortSignal | undefined, abort: () => void): () => void {
  if (!signal) return () => undefined;
  try {
    // Many calls may have one signal, of which Node would warn.
    setMaxListeners(0, signal);
  } catch {
    // It is not Node's own, as that of a polyfill or of jsdom.
  }
  signal.addEventListener("abort", abort);
  return () => signal.removeEventListener("abort", abort);
}

/** What each of an API's channels has. */
export interface ConnectionSettings {
  credentials: ChannelCredentials;
  metadata: Metadata;
  timeoutMs: number | undefined;
  retries: boolean;
  maxRequestBytes: number;
  maxResponseBytes: number;
  serverName: string | undefined;
}

/** The calls to one gateway. `proxy`: for messages. */
interface Channel {
  readonly target: string;
  readonly client: Client;
  readonly proxy: string;
}

interface Answer {
  response: unknown;
  trailing: Metadata | undefined;
}

export class Connection {
  readonly targets: readonly string[];
  readonly #settings: ConnectionSettings;
  readonly #channels: ReadonlyMap<string, Channel>;
  readonly #gateways: Gateways;

  constructor(targets: readonly string[], settings: ConnectionSettings) {
    this.targets = targets;
    this.#settings = settings;
    this.#gateways = new Gateways(targets);
    const made = targets.map((target): [string, Channel] => [target, channelTo(target, settings, targets.length > 1)]);
    this.#channels = new Map(made);
  }

  /**
   * Makes a unary call, again if that is safe and its gateway is away. Throws QuireError;
   * Error for a request that cannot be encoded.
   */
  async unary<I extends DescMessage, O extends DescMessage>(
    method: Method<I, O>,
    request: Response<I>,
    options: CallOptions,
  ): Promise<Response<O>> {
    checkOptions(method, options);
    const bytes = bufferOf(toBinary(method.input, request));
    const deadline = this.#deadlineOf(options);
    const most = this.targets.length > 1 ? MAX_ATTEMPTS_OF_SEVERAL : MAX_ATTEMPTS;
    const maxAttempts = this.#settings.retries && mayRepeat(method, request) ? most : 1;
    for (let attempt = 1, longestMs = INITIAL_BACKOFF_MS; ; attempt++) {
      const target = this.#gateways.target(request);
      let response: Response<O> | undefined;
      let failed: QuireError | undefined;
      try {
        const answer = await this.#attempt(method, request, bytes, this.#channels.get(target)!, deadline, options.signal);
        response = answer.response as Response<O>;
        this.#gateways.answered(target, request, response, answer.trailing);
        failed = failedItem(response);
        if (!failed) return response;
      } catch (error) {
        if (!(error instanceof QuireError)) throw error;
        failed = error;
      }
      // Jitter spreads the retries of many clients. The server's delay is the minimum.
      const serverDelayMs = failed.retryDelayMs ?? 0;
      const pauseMs = Math.max(longestMs * (0.5 + Math.random() / 2), serverDelayMs);
      const isLate = deadline !== undefined && Date.now() + pauseMs >= deadline;
      if (!isConnectionError(failed, options.signal) || attempt === maxAttempts || isLate || serverDelayMs > MAX_SERVER_DELAY_MS) {
        if (response) return response; // What the other items are answered.
        throw failed;
      }
      this.#gateways.failed(target);
      await sleep(pauseMs, undefined, options.signal && { signal: options.signal }).catch(() => {
        throw cancelled();
      });
      longestMs = Math.min(longestMs * BACKOFF_MULTIPLIER, MAX_BACKOFF_MS);
    }
  }

  /** Starts a server-streaming call. Returns a Readable, which fails with grpc-js's ServiceError, and the target's proxy. */
  serverStream<I extends DescMessage, O extends DescMessage>(
    method: DescMethodServerStreaming<I, O>,
    request: Request<I>,
    options: CallOptions,
    target = this.targets[0]!,
  ) {
    checkOptions(method, options);
    const { client, proxy } = this.#channels.get(target)!;
    const call = client.makeServerStreamRequest<Buffer, Response<O>>(
      pathOf(method),
      asBytes,
      (bytes) => fromBinary(method.output, bytes),
      bufferOf(toBinary(method.input, create(method.input, request))),
      this.#settings.metadata,
      grpcOptions(this.#deadlineOf(options)),
    );
    // Ignore the error of a cancellation after the reader has left.
    call.on("error", () => undefined);
    cancelOn(options.signal, call);
    return { call, proxy };
  }

  /** Sends requests on a stream to the first target, and returns the response. Throws QuireError, and what `requests` throws. */
  async clientStream<I extends DescMessage, O extends DescMessage>(
    method: { input: I; output: O; name: string; parent: { typeName: string } },
    requests: AsyncIterable<Request<I>>,
    options: CallOptions,
  ): Promise<Response<O>> {
    checkOptions(method, options);
    // Before there is a call: grpc-js leaves one open that is cancelled at once, until the server ends it.
    const following = requests[Symbol.asyncIterator]();
    let next = await following.next();
    if (options.signal?.aborted) throw cancelled();
    const { client, proxy } = this.#channels.get(this.targets[0]!)!;
    let isOver = false;
    let wake: () => void = () => undefined;
    const { promise, resolve, reject } = settled<Response<O>>();
    const call = client.makeClientStreamRequest<Buffer, Response<O>>(
      pathOf(method),
      asBytes,
      (bytes) => fromBinary(method.output, bytes),
      this.#settings.metadata,
      grpcOptions(this.#deadlineOf(options)),
      (error, response) => {
        isOver = true;
        wake();
        if (error) reject(errorFromCall(error, proxy));
        else resolve(response!);
      },
    );
    // The server may answer before it has read everything.
    promise.catch(() => undefined);
    call.on("error", () => undefined);
    call.on("drain", () => wake());
    cancelOn(options.signal, call);
    try {
      for (; !next.done && !isOver && !options.signal?.aborted; next = await following.next()) {
        const isFull = !call.write(bufferOf(toBinary(method.input, create(method.input, next.value))));
        if (isFull && !isOver) await new Promise<void>((go) => (wake = go));
      }
    } catch (error) {
      call.cancel();
      throw error;
    } finally {
      await following.return?.();
    }
    // grpc-js sends what is written to a call that was cancelled before it had a connection.
    if (!options.signal?.aborted) call.end();
    return await promise;
  }

  /** Starts a bidirectional stream of encoded requests. It has no deadline. */
  bothStreams<O extends DescMessage>(method: { output: O; name: string; parent: { typeName: string } }) {
    const { client, proxy } = this.#channels.get(this.nextTarget())!;
    const call = client.makeBidiStreamRequest<Buffer, Response<O>>(
      pathOf(method),
      asBytes,
      (bytes) => fromBinary(method.output, bytes),
      this.#settings.metadata,
    );
    return { call, proxy };
  }

  /** Of several, the one whose turn it is to get a stream. */
  nextTarget(): string {
    return this.#gateways.next();
  }

  /** Waits until the server, or one of several, is reachable. Throws QuireError after the timeout. */
  async ready(timeoutMs: number): Promise<void> {
    const until = deadlineOf(timeoutMs) ?? Infinity;
    for (;;) {
      // In turns, because grpc-js cannot end the wait for one of several when another one is ready.
      const limit = Math.min(until, Date.now() + READY_TURN_MS);
      const waits = [...this.#channels.values()].map((channel) => readyBy(channel, limit));
      try {
        return await Promise.any(waits);
      } catch (error) {
        if (Date.now() >= until) throw (error as AggregateError).errors[0];
      }
    }
  }

  close(): void {
    for (const { client } of this.#channels.values()) client.close();
  }

  #attempt(
    method: Method<DescMessage, DescMessage>,
    request: object,
    bytes: Buffer,
    { client, proxy }: Channel,
    deadline: number | undefined,
    signal: AbortSignal | undefined,
  ): Promise<Answer> {
    return new Promise((resolve, reject) => {
      if (signal?.aborted) return reject(cancelled());
      const forget = onAbort(signal, () => call.cancel());
      const timer = this.targets.length > 1 ? setTimeout(() => leaveIfUnconnected(client, call), CONNECT_TIMEOUT_MS) : undefined;
      const answer: Answer = { response: undefined, trailing: undefined };
      const end = () => {
        clearTimeout(timer);
        forget();
      };
      let call: ClientUnaryCall;
      try {
        call = client.makeUnaryRequest<Buffer, unknown>(
          pathOf(method),
          asBytes,
          (received) => fromBinary(method.output, received),
          bytes,
          this.#settings.metadata,
          grpcOptions(deadline),
          (error, response) => {
            end();
            if (error) {
              if (signal?.aborted || error.code === status.DEADLINE_EXCEEDED) this.#releaseAfter(method, request, client);
              return reject(errorFromCall(error, proxy));
            }
            answer.response = response;
            resolve(answer);
          },
        );
      } catch (error) {
        end(); // The client is closed.
        throw error;
      }
      // grpc-js emits it right after the response, before anything that awaits the response goes on.
      call.on("status", ({ metadata }) => (answer.trailing = metadata));
    });
  }

  /** Releases what an abandoned call may have made, as nobody got the ids. A release that may not have arrived is sent again. */
  #releaseAfter(method: Method<DescMessage, DescMessage>, request: object, client: Client): void {
    const { input } = RELEASE_CACHE;
    const requestIds = ownRequestIds(request);
    if (method !== RELEASE_CACHE && !requestIds.length) return;
    const message = method === RELEASE_CACHE ? (request as Response<typeof input>) : create(input, { requestIds });
    const options = grpcOptions(deadlineOf(RELEASE_TIMEOUT_MS));
    const ignore = () => undefined;
    try {
      const bytes = bufferOf(toBinary(input, message));
      client.makeUnaryRequest(pathOf(RELEASE_CACHE), asBytes, ignore, bytes, this.#settings.metadata, options, ignore);
    } catch {
      return; // The client is closed.
    }
  }

  #deadlineOf(options: CallOptions): number | undefined {
    return deadlineOf(options.timeoutMs ?? this.#settings.timeoutMs);
  }
}

/** `isOneOfSeveral`: it may be silent. */
function channelTo(target: string, settings: ConnectionSettings, isOneOfSeveral: boolean): Channel {
  const { credentials, maxRequestBytes, maxResponseBytes, retries, serverName } = settings;
  const client = new Client(target, credentials, {
    ...channelOptions(target),
    "grpc.max_send_message_length": maxRequestBytes,
    "grpc.max_receive_message_length": maxResponseBytes,
    "grpc.initial_reconnect_backoff_ms": INITIAL_BACKOFF_MS,
    "grpc.max_reconnect_backoff_ms": MAX_BACKOFF_MS,
    "grpc.enable_retries": retries ? 1 : 0,
    ...(serverName === undefined ? {} : { "grpc.ssl_target_name_override": serverName }),
    // Without pings a call would wait forever for a server whose host has disappeared. Of several gateways one that answers
    // none is left soon: the next attempt goes to another one. A single one may be paused.
    "grpc.keepalive_time_ms": isOneOfSeveral ? 2000 : 20_000,
    "grpc.keepalive_timeout_ms": isOneOfSeveral ? 3000 : 20_000,
  });
  return { target, client, proxy: proxyOf(target) };
}

function readyBy({ client, proxy }: Channel, deadline: number): Promise<void> {
  return new Promise((resolve, reject) => {
    client.waitForReady(deadline, (error) => {
      const through = proxy && ` (through the proxy ${proxy})`;
      if (error) reject(new Unavailable(status.UNAVAILABLE, error.message + through, { cause: error }));
      else resolve();
    });
  });
}

/** Converts bytes to the type of grpc-js without a copy. */
export function bufferOf(bytes: Uint8Array): Buffer {
  return Buffer.from(bytes.buffer, bytes.byteOffset, bytes.byteLength);
}

/** Requests are encoded before they are given to grpc-js, which would encode them for each attempt. */
function asBytes(encoded: Buffer): Buffer {
  return encoded;
}

function pathOf(method: { name: string; parent: { typeName: string } }): string {
  return `/${method.parent.typeName}/${method.name}`;
}

function grpcOptions(deadline: number | undefined): GrpcCallOptions {
  return deadline === undefined ? {} : { deadline };
}

/** Cancels a stream when a signal is given, until it has closed. */
function cancelOn(signal: AbortSignal | undefined, call: { cancel(): void; on(event: "close", listener: () => void): unknown }) {
  call.on("close", onAbort(signal, () => call.cancel()));
  if (signal?.aborted) call.cancel();
}

function leaveIfUnconnected(client: Client, { call }: ClientUnaryCall): void {
  const isConnected = client.getChannel().getConnectivityState(false) === connectivityState.READY;
  if (!isConnected) call?.cancelWithStatus(status.UNAVAILABLE, `no connection within ${CONNECT_TIMEOUT_MS} ms`);
}

function settled<T>() {
  let resolve!: (value: T) => void;
  let reject!: (error: unknown) => void;
  const promise = new Promise<T>((done, failed) => ([resolve, reject] = [done, failed]));
  return { promise, resolve, reject };
}

/** The error of an item of a batch whose gateway was away. Items that were applied are not applied again. */
function failedItem(response: unknown): QuireError | undefined {
  type Result = { result?: { case?: string; value?: unknown } };
  const { results } = response as { results?: readonly Result[] };
  const away = results?.find(
    ({ result }) => result?.case === "error" && (result.value as Status).code === status.UNAVAILABLE,
  );
  return away && errorFromStatus(away.result!.value as Status);
}
