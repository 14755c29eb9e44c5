/** The client: its connection and its methods. */

import { randomUUID } from "node:crypto";

import { credentials as grpcCredentials, type ChannelCredentials, Metadata, type ServiceError } from "@grpc/grpc-js";

import { Caller, type CallName, type CallRequest, type CallResponse } from "./cache.js";
import { type CallOptions, Connection, type UnaryCalls } from "./connection.js";
import { errorFromCall } from "./errors.js";
import { Execution, type ExecuteSettings, item } from "./execution.js";
import { AdminServiceDefinition } from "./gen/quire/v1/admin.js";
import { ModelExecutorServiceDefinition } from "./gen/quire/v1/executor.js";
import {
  type DeepPartial,
  type ExecuteItem,
  type LoadWeightsRequest,
  type LoadWeightsResponse,
  ModelRunnerServiceDefinition,
} from "./gen/quire/v1/runner.js";
import { type Batch, serializeBatch, Session, type SessionOptions } from "./session.js";

/** Certificates are PEM. */
export interface TlsOptions {
  /** The trusted certificate authorities. Undefined: those of Node. */
  ca?: Buffer;
  /** The client's own certificate and private key. */
  cert?: Buffer;
  key?: Buffer;
  /** The name in the server's certificate, if it differs from the target's. */
  serverName?: string;
}

export interface ClientOptions {
  /** Undefined or false: no TLS. True: TLS with Node's certificate authorities. */
  tls?: boolean | TlsOptions | undefined;
  /** Sent with every call, without TLS unencrypted. */
  token?: string | undefined;
  /** The timeout of each call without its own `timeoutMs`, including retries. Undefined: no timeout. */
  timeoutMs?: number | undefined;
  maxRequestBytes?: number;
  maxResponseBytes?: number;
}

/** A connection to a Quire server. Connects when first used. Close it. */
export class QuireClient extends Caller {
  /** Every unary call of each service. For the streams use `session`, `execute` and `loadWeights`. */
  readonly executor: UnaryCalls<typeof ModelExecutorServiceDefinition>;
  readonly runner: UnaryCalls<typeof ModelRunnerServiceDefinition>;
  readonly admin: UnaryCalls<typeof AdminServiceDefinition>;
  readonly #connection: Connection;
  readonly #timeoutMs: number | undefined;
  readonly #maxRequestBytes: number;

  constructor(target = "127.0.0.1:50051", options: ClientOptions = {}) {
    super();
    const { tls, token, timeoutMs, maxRequestBytes = 16 << 20, maxResponseBytes = 64 << 20 } = options;
    const serverName = typeof tls === "object" ? tls.serverName : undefined;
    const settings = { metadata: bearer(token), timeoutMs, maxRequestBytes, maxResponseBytes, serverName };
    this.#connection = new Connection(target, credentialsOf(tls), settings);
    this.#timeoutMs = timeoutMs;
    this.#maxRequestBytes = maxRequestBytes;
    this.executor = this.#connection.calls(ModelExecutorServiceDefinition);
    this.runner = this.#connection.calls(ModelRunnerServiceDefinition);
    this.admin = this.#connection.calls(AdminServiceDefinition);
  }

  /** Waits until the server is reachable. To wait for its workers, use `admin.warmup`. */
  async ready(timeoutMs: number): Promise<void> {
    await this.#connection.ready(timeoutMs);
  }

  /** See `Caller.call`. Makes the call of this name of `executor`. */
  call<Name extends CallName>(
    name: Name,
    request: CallRequest<Name>,
    options?: CallOptions,
  ): Promise<CallResponse<Name>> {
    const method = name === "truncateKv" ? "truncateKV" : name;
    const calls = this.executor as unknown as Record<string, (...given: unknown[]) => Promise<CallResponse<Name>>>;
    return calls[method]!(request, options);
  }

  /** Opens a stream for many concurrent calls. Each costs less, and calls that are sent together are batched. */
  session(options: SessionOptions = {}): Session {
    const service = ModelExecutorServiceDefinition;
    const stream = this.#connection.bothStreams<Batch, typeof service.methods.session>(
      service,
      service.methods.session,
      serializeBatch,
    );
    return new Session(stream, {
      ...options,
      proxy: this.#connection.proxy,
      timeoutMs: this.#timeoutMs,
      maxRequestBytes: this.#maxRequestBytes,
    });
  }

  /** Generates for a text or for the items of a batch. Returns an async iterable of chunks. */
  execute(items: string | readonly DeepPartial<ExecuteItem>[], settings: ExecuteSettings = {}): Execution {
    const service = ModelRunnerServiceDefinition;
    const own = {
      requestId: settings.requestId || randomUUID(),
      timeoutMs: settings.timeoutMs ?? this.#timeoutMs,
      proxy: this.#connection.proxy,
    };
    return new Execution(
      typeof items === "string" ? [item(items)] : items,
      { ...settings, ...own },
      (request, options) => this.#connection.serverStream(service, service.methods.execute, request, options),
      (requestId) => this.runner.cancelExecution({ requestId }),
    );
  }

  /** Replaces the weights by others of the same config. Returns an async iterable of progress messages. */
  async *loadWeights(
    request: DeepPartial<LoadWeightsRequest>,
    options: CallOptions = {},
  ): AsyncGenerator<LoadWeightsResponse, void, void> {
    const service = ModelRunnerServiceDefinition;
    const call = this.#connection.serverStream(service, service.methods.loadWeights, request, options);
    try {
      yield* call;
    } catch (error) {
      throw errorFromCall(error as ServiceError, this.#connection.proxy);
    } finally {
      call.cancel();
    }
  }

  /** Closes the connection when its calls have ended. Caches are kept until their leases expire. */
  close(): void {
    this.#connection.close();
  }
}

function credentialsOf(tls: ClientOptions["tls"]): ChannelCredentials {
  if (!tls) return grpcCredentials.createInsecure();
  const { ca = null, key = null, cert = null } = tls === true ? {} : tls;
  return grpcCredentials.createSsl(ca, key, cert);
}

/** The metadata of calls with a token. Throws RangeError, without showing the token, if it is invalid. */
function bearer(token: string | undefined): Metadata {
  const metadata = new Metadata();
  if (!token) return metadata;
  if (!/^[\x21-\x7e]+$/.test(token)) throw new RangeError("a token has printable ASCII characters only");
  metadata.set("authorization", `Bearer ${token}`);
  return metadata;
}
