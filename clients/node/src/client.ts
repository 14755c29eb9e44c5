/** The client: how it connects, and what can be done with it. */

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
  /** Whom to trust. Undefined: whom Node trusts. */
  ca?: Buffer;
  /** This client's own certificate and key. */
  cert?: Buffer;
  key?: Buffer;
  /** The name in the server's certificate, where it is not that of the target. */
  serverName?: string;
}

export interface ClientOptions {
  /** Undefined or false: no TLS. True: TLS that trusts whom Node trusts. */
  tls?: boolean | TlsOptions | undefined;
  /** Goes with every call; without TLS in plain view. */
  token?: string | undefined;
  /** Bounds each call that has no `timeoutMs` of its own, retries included. Undefined: no bound. */
  timeoutMs?: number | undefined;
  maxRequestBytes?: number;
  maxResponseBytes?: number;
}

/** A connection to a Quire server, made when it is first used. Close it. */
export class QuireClient extends Caller {
  /** Every call of each service that has one answer; for streams there are `session`, `execute` and `loadWeights`. */
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

  /** Waits until a server is there; its workers may be loading still, for which there is `admin.warmup`. */
  async ready(timeoutMs: number): Promise<void> {
    await this.#connection.ready(timeoutMs);
  }

  /** See `Caller.call`: the same as the call of that name of `executor`. */
  call<Name extends CallName>(
    name: Name,
    request: CallRequest<Name>,
    options?: CallOptions,
  ): Promise<CallResponse<Name>> {
    const method = name === "truncateKv" ? "truncateKV" : name;
    const calls = this.executor as unknown as Record<string, (...given: unknown[]) => Promise<CallResponse<Name>>>;
    return calls[method]!(request, options);
  }

  /** Opens a stream for many calls at once: less work for each, and what is sent together runs together. */
  session(options: SessionOptions = {}): Session {
    const service = ModelExecutorServiceDefinition;
    const stream = this.#connection.bothStreams<Batch, typeof service.methods.session>(
      service,
      service.methods.session,
      serializeBatch,
    );
    return new Session(stream, {
      ...options,
      timeoutMs: this.#timeoutMs,
      maxRequestBytes: this.#maxRequestBytes,
    });
  }

  /** Generates for a text, or for all items of a batch: an async iterable of chunks. */
  execute(items: string | readonly DeepPartial<ExecuteItem>[], settings: ExecuteSettings = {}): Execution {
    const service = ModelRunnerServiceDefinition;
    return new Execution(
      typeof items === "string" ? [item(items)] : items,
      { ...settings, requestId: settings.requestId || randomUUID() },
      (request) => this.#connection.serverStream(service, service.methods.execute, request, settings),
      (requestId) => this.runner.cancelExecution({ requestId }),
    );
  }

  /** Serves another model from now on, and says how far that is. */
  async *loadWeights(
    request: DeepPartial<LoadWeightsRequest>,
    options: CallOptions = {},
  ): AsyncGenerator<LoadWeightsResponse, void, void> {
    const service = ModelRunnerServiceDefinition;
    const call = this.#connection.serverStream(service, service.methods.loadWeights, request, options);
    try {
      yield* call;
    } catch (error) {
      throw errorFromCall(error as ServiceError);
    } finally {
      call.cancel();
    }
  }

  /** Ends the connection when its calls have ended. Caches stay until their leases run out. */
  close(): void {
    this.#connection.close();
  }
}

function credentialsOf(tls: ClientOptions["tls"]): ChannelCredentials {
  if (!tls) return grpcCredentials.createInsecure();
  const { ca = null, key = null, cert = null } = tls === true ? {} : tls;
  return grpcCredentials.createSsl(ca, key, cert);
}

/** The metadata of calls that carry a token. Throws RangeError for what can be none; does not show it. */
function bearer(token: string | undefined): Metadata {
  const metadata = new Metadata();
  if (!token) return metadata;
  if (!/^[\x21-\x7e]+$/.test(token)) throw new RangeError("a token has printable ASCII characters only");
  metadata.set("authorization", `Bearer ${token}`);
  return metadata;
}
