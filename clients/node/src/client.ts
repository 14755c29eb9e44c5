/** The client: its connection and its methods. */

import { randomUUID } from "node:crypto";

import { create, type DescMessage } from "@bufbuild/protobuf";
import { type ChannelCredentials, credentials as grpcCredentials, Metadata, type ServiceError, status } from "@grpc/grpc-js";

import { resultOf } from "./batches.js";
import { Caller } from "./cache.js";
import { type CallOptions, Connection } from "./connection.js";
import { checkTime, durationOf } from "./duration.js";
import { type Cause, causeOf, policyOf, type Priority, priorityOf } from "./enums.js";
import { errorFromCall, InternalError, QuireError } from "./errors.js";
import { Execution, type ExecuteSettings } from "./execution.js";
import { targetsOf } from "./gateways.js";
import {
  type Adapter,
  AdminService,
  type LoadWeightsResponse,
  PreviousCaches,
  type ReplacedWorker,
} from "./gen/quire/v1/admin_pb.js";
import {
  type GetCapabilitiesResponse,
  type GetModelInfoResponse,
  type GetStatusResponse,
  ModelExecutorService,
  type UnifiedForwardItemResponse,
  type UnifiedForwardItemSchema,
  type WorkerCacheMetrics,
  type WorkerLoraMetrics,
} from "./gen/quire/v1/executor_pb.js";
import {
  type CostEstimate,
  type ExecuteItem,
  ExecuteRequestSchema,
  ModelRunnerService,
  type Runtime,
} from "./gen/quire/v1/runner_pb.js";
import type { KvCacheHandle } from "./gen/quire/v1/types_pb.js";
import { itemsOf, type Prompt, type TextSettings } from "./items.js";
import { messageOf, type Method, refuse, type Request, type Response } from "./methods.js";
import { isPrivate } from "./proxies.js";
import { Session, type SessionOptions } from "./session.js";
import { type AdapterFiles, adapterRequests, type WeightFiles, weightRequests } from "./uploads.js";

const EXECUTOR = ModelExecutorService.method;
const RUNNER = ModelRunnerService.method;
const ADMIN = AdminService.method;
// Caches in a page of ListCaches: the most that it allows.
const PAGE_SIZE = 1000;

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
  /** Sent with every call. Without TLS it is sent only to this machine. */
  token?: string | undefined;
  /** Send the token without TLS also to other machines, for networks that encrypt. */
  tokenInPlainView?: boolean;
  /** The timeout of each call without its own `timeoutMs`, including retries. Undefined: no timeout. */
  timeoutMs?: number | undefined;
  /** The scheduling priority of all calls without their own. Undefined: normal. */
  priority?: Priority | undefined;
  /** False: failed calls are never retried, even if that is safe. */
  retries?: boolean;
  maxRequestBytes?: number;
  maxResponseBytes?: number;
}

/** A connection to a Quire server. Connects when first used. Close it. */
export class QuireClient extends Caller implements AsyncDisposable {
  readonly #connection: Connection;
  readonly #options: { timeoutMs: number | undefined; priority: Priority | undefined; retries: boolean };
  readonly #maxRequestBytes: number;

  /**
   * `target`: such as `host:port` or `unix:/path`. Several gateways of one server as a list, or as `host:port,host:port`: a call
   * goes to the one that has its cache, and its next attempt to another one. Throws RangeError for invalid settings.
   */
  constructor(target: string | readonly string[] = "127.0.0.1:50051", options: ClientOptions = {}) {
    super();
    const { tls, token, tokenInPlainView = false, timeoutMs, priority, retries = true, ...others } = options;
    const { maxRequestBytes = 16 << 20, maxResponseBytes = 64 << 20, ...unknown } = others;
    refuse("a client", unknown);
    checkTime("timeoutMs", timeoutMs);
    priorityOf(priority);
    const targets = targetsOf(target);
    if (token && !tls && !tokenInPlainView && !targets.every(isPrivate)) {
      throw new RangeError(`without TLS the token would go to ${targets} in plain view: give tls, or tokenInPlainView: true`);
    }
    this.#connection = new Connection(targets, {
      credentials: credentialsOf(tls),
      metadata: bearer(token),
      serverName: typeof tls === "object" ? tls.serverName : undefined,
      ...{ timeoutMs, retries, maxRequestBytes, maxResponseBytes },
    });
    this.#options = { timeoutMs, priority, retries };
    this.#maxRequestBytes = maxRequestBytes;
  }

  /** Waits until the server is reachable. To wait for its workers, use `warmup`. */
  async ready(timeoutMs: number): Promise<void> {
    await this.#connection.ready(timeoutMs);
  }

  /** Makes a unary call, again if that is safe (see docs/clients.md). Throws QuireError. */
  async call<I extends DescMessage, O extends DescMessage>(
    method: Method<I, O>,
    request: Request<I>,
    options: CallOptions = {},
  ): Promise<Response<O>> {
    const message = messageOf(method.input, request, options.priority ?? this.#options.priority);
    return await this.#connection.unary(method, message, options);
  }

  /**
   * Opens a stream for many concurrent calls. Each costs less, and calls that are sent together are batched. Throws RangeError
   * for invalid settings, and TypeError.
   */
  session({ maxInFlight, closeTimeoutMs, ...unknown }: SessionOptions = {}): Session {
    refuse("a session", unknown);
    checkTime("closeTimeoutMs", closeTimeoutMs);
    if (!((maxInFlight ?? 1) >= 1)) throw new RangeError(`maxInFlight must be at least 1, not ${maxInFlight}`);
    const { call, proxy } = this.#connection.bothStreams(EXECUTOR.session);
    const { timeoutMs, priority } = this.#options;
    const own = { maxInFlight, closeTimeoutMs, maxRequestBytes: this.#maxRequestBytes };
    return new Session(call, { ...own, proxy, timeoutMs, priority });
  }

  /**
   * Generates whole texts on the server: for items (see `item`), or for one or several prompts with their settings. Returns an
   * async iterable of chunks; `texts()` waits for all. The ids of several prompts are "0", "1" and so on. Throws TypeError or
   * RangeError for invalid items.
   */
  execute(
    items: Prompt | readonly Prompt[] | readonly ExecuteItem[],
    settings: ExecuteSettings & TextSettings = {},
  ): Execution {
    const { runtime, policy, requestId, keepMs, maxCostUsd, timeoutMs, priority, signal, raiseOnError, ...text } = settings;
    const request = create(ExecuteRequestSchema, {
      items: itemsOf(items, text),
      requestId: requestId || randomUUID(),
      policy: policyOf(policy),
      priority: priorityOf(priority ?? this.#options.priority),
      keep: durationOf(keepMs),
      ...{ runtime, maxCostUsd },
    });
    const { retries } = this.#options;
    // Only this gateway knows a kept execution.
    const target = this.#connection.nextTarget();
    return new Execution(
      request,
      { timeoutMs: timeoutMs ?? this.#options.timeoutMs, signal, raiseOnError, retries },
      (asked, options) => this.#connection.serverStream(RUNNER.execute, asked, options, target),
      (id) => this.cancelExecution(id),
    );
  }

  /** The text that the server generates for a prompt: a text, token ids, or messages. `execute` has more. */
  async generate(prompt: Prompt, settings: ExecuteSettings & TextSettings = {}): Promise<string> {
    const execution = this.execute(prompt, settings);
    if (execution.numTexts > 1) throw new TypeError("generate returns one text; for several: execute(...).texts()");
    return (await execution.texts()).join("");
  }

  /** Ends a kept execution (`keepMs`), also of another client. Returns whether there was one. */
  async cancelExecution(requestId: string, options: CallOptions = {}): Promise<boolean> {
    const method = RUNNER.cancelExecution;
    const request = create(method.input, { requestId });
    return (await this.#connection.unary(method, request, options)).cancelled;
  }

  /**
   * Loads a LoRA adapter in PEFT's layout: give either `source`, a directory of the server's machine, or
   * `files`, a directory of this machine or the contents of its files by their names. If the id is in use, this makes a new
   * version; so it is never retried. `pinned`: keep it in the memory of workers. `shared`: all tenants can use it.
   */
  async loadAdapter(
    adapterId: string,
    settings: CallOptions & { source?: string; files?: AdapterFiles; pinned?: boolean; shared?: boolean },
  ): Promise<Adapter> {
    const { source, files, pinned, shared, ...options } = settings;
    const requests = adapterRequests({ adapterId, source, pinned, shared }, files, this.#maxRequestBytes);
    return (await this.#connection.clientStream(ADMIN.loadAdapter, requests, options)).adapter!;
  }

  /** Removes an adapter's id. Returns whether there was one. Its caches can be used until their release. */
  async unloadAdapter(adapterId: string, options: CallOptions & { shared?: boolean } = {}): Promise<boolean> {
    const { shared, ...call } = options;
    return (await this.call(ADMIN.unloadAdapter, { adapterId, shared }, call)).unloaded;
  }

  /** The adapters that this client can use, ordered by id. */
  async listAdapters(options: CallOptions = {}): Promise<Adapter[]> {
    return (await this.call(ADMIN.listAdapters, {}, options)).adapters;
  }

  /**
   * Sends new weights for the served model, in safetensors format. Returns a source for `loadWeights`. The server keeps the
   * latest upload until it has been loaded and other weights are served. It is never retried.
   */
  async uploadWeights(files: WeightFiles, options: CallOptions = {}): Promise<string> {
    const requests = weightRequests(files, this.#maxRequestBytes);
    return (await this.#connection.clientStream(ADMIN.uploadWeights, requests, options)).source;
  }

  /**
   * Replaces the weights by others of the same config: of a directory of the server's machine, or what
   * `uploadWeights` returned. Returns the last message, which says what is served now; `onProgress` gets each one. `recompute`:
   * caches continue, and their KV is recomputed with the new weights. `keepKv`: they continue, and the KV that there is of them
   * stays. Otherwise they end. It is never retried.
   */
  async loadWeights(
    source: string,
    settings: CallOptions & {
      recompute?: boolean;
      keepKv?: boolean;
      onProgress?: (update: LoadWeightsResponse) => void;
    } = {},
  ): Promise<LoadWeightsResponse> {
    const { recompute, keepKv, onProgress, ...options } = settings;
    if (recompute && keepKv) throw new TypeError("give either recompute or keepKv");
    const continues = keepKv ? PreviousCaches.KEEP_KV : recompute ? PreviousCaches.RECOMPUTE : undefined;
    const request = { source, previousCaches: continues };
    const { call, proxy } = this.#connection.serverStream(ADMIN.loadWeights, request, options);
    const updates: AsyncIterable<LoadWeightsResponse> = call;
    let served: LoadWeightsResponse | undefined;
    const next = updates[Symbol.asyncIterator]();
    try {
      for (;;) {
        const { value, done } = await next.next().catch((error: ServiceError) => {
          throw errorFromCall(error, proxy);
        });
        if (done) break;
        served = value;
        onProgress?.(value);
      }
    } finally {
      call.cancel();
    }
    if (!served) throw new InternalError(status.INTERNAL, "the server sent no answer");
    return served;
  }

  /** All caches of this client's tenant. The timeout is that of each page of 1,000. */
  async listCaches(options: CallOptions = {}): Promise<KvCacheHandle[]> {
    const handles: KvCacheHandle[] = [];
    for (let pageToken = ""; ; ) {
      const page = await this.call(EXECUTOR.listCaches, { pageSize: PAGE_SIZE, pageToken }, options);
      handles.push(...page.kvCaches);
      pageToken = page.nextPageToken;
      if (!pageToken) return handles;
    }
  }

  /**
   * A mixed batch: whole prompts, chunks of prompts and single tokens in one call. The errors of failed items are returned in
   * their places.
   */
  async unifiedForward(
    items: Request<typeof UnifiedForwardItemSchema>[],
    options: CallOptions = {},
  ): Promise<(UnifiedForwardItemResponse | QuireError)[]> {
    const { results } = await this.call(EXECUTOR.unifiedForward, { items }, options);
    return results.map((result) => resultOf<UnifiedForwardItemResponse>(result));
  }

  /** The runtimes that `execute` can use, in the order of the configuration. */
  async listRuntimes(options: CallOptions = {}): Promise<Runtime[]> {
    return (await this.call(RUNNER.listRuntimes, {}, options)).runtimes;
  }

  /** The maximum cost of what `execute` would do, on one runtime or, without a name, on each. */
  async estimateCost(
    items: Prompt | readonly Prompt[] | readonly ExecuteItem[],
    settings: CallOptions & TextSettings & { runtime?: string } = {},
  ): Promise<CostEstimate[]> {
    const { runtime, timeoutMs, priority, signal, ...text } = settings;
    const request = { runtime, items: itemsOf(items, text) };
    return (await this.call(RUNNER.estimateCost, request, { timeoutMs, priority, signal })).estimates;
  }

  /** A vector of the length 1 for each text, or for each list of token ids, as the model's `pooling` says. */
  async embed(
    inputs: readonly (string | readonly number[])[],
    settings: CallOptions & { dimensions?: number; adapterId?: string; cacheSalt?: string } = {},
  ): Promise<number[][]> {
    const { dimensions, adapterId, cacheSalt, ...options } = settings;
    const given = inputs.map((one) =>
      typeof one === "string"
        ? { input: { case: "text" as const, value: one } }
        : { input: { case: "tokens" as const, value: { tokenIds: [...one] } } },
    );
    const request = { inputs: given, dimensions, adapterId, cacheSalt };
    return (await this.call(RUNNER.embed, request, options)).embeddings.map(({ values }) => values);
  }

  /**
   * Restarts the workers, or connects anew to a provider. Returns how many processes or connections. It is never retried.
   */
  async rebuildSession(runtime = "", options: CallOptions & { cause?: Cause } = {}): Promise<number> {
    const { cause = "manual", ...call } = options;
    return (await this.call(ADMIN.rebuildSession, { runtime, cause: causeOf(cause) }, call)).rebuilt;
  }

  /** Waits until this many workers are ready; 0: all. Returns how many are. */
  async warmup(workers = 0, options: CallOptions = {}): Promise<number> {
    return (await this.call(ADMIN.warmup, { workers }, options)).workersReady;
  }

  /**
   * Restarts a worker, or without a name all, one after another; returns when the new ones are ready. `graceMs` is how long
   * running operations may take before another worker computes them again. It is never retried.
   */
  async drain(workerId = "", options: CallOptions & { graceMs?: number } = {}): Promise<ReplacedWorker[]> {
    const { graceMs, ...call } = options;
    return (await this.call(ADMIN.drain, { workerId, grace: durationOf(graceMs) }, call)).workers;
  }

  /** Stops the server gracefully, and returns at once. `leaveWorkers`: the next server takes them over. */
  async shutdown(options: CallOptions & { leaveWorkers?: boolean } = {}): Promise<void> {
    const { leaveWorkers, ...call } = options;
    await this.call(ADMIN.shutdown, { leaveWorkers }, call);
  }

  /** The description of the model; with tokenizer.json and the chat template if requested. */
  async modelInfo(
    options: CallOptions & { includeTokenizer?: boolean; includeChatTemplate?: boolean } = {},
  ): Promise<GetModelInfoResponse> {
    const { includeTokenizer, includeChatTemplate, ...call } = options;
    return await this.call(EXECUTOR.getModelInfo, { includeTokenizer, includeChatTemplate }, call);
  }

  /** What the server can do, and its limits. */
  async capabilities(options: CallOptions = {}): Promise<GetCapabilitiesResponse> {
    return await this.call(EXECUTOR.getCapabilities, {}, options);
  }

  /** The state of the gateway and its workers. */
  async status(options: CallOptions = {}): Promise<GetStatusResponse> {
    return await this.call(EXECUTOR.getStatus, {}, options);
  }

  /** The KV pages of each worker. `checkIntegrity` also checks the invariants of every pool. */
  async cacheMetrics(options: CallOptions & { checkIntegrity?: boolean } = {}): Promise<WorkerCacheMetrics[]> {
    const { checkIntegrity, ...call } = options;
    return (await this.call(EXECUTOR.getCacheMetrics, { checkIntegrity }, call)).workers;
  }

  /** The use of adapters on each worker. */
  async loraMetrics(options: CallOptions = {}): Promise<WorkerLoraMetrics[]> {
    return (await this.call(EXECUTOR.getLoraMetrics, {}, options)).workers;
  }

  /** Closes the connection when its calls have ended. Caches are kept until their leases expire. */
  close(): void {
    this.#connection.close();
  }

  async [Symbol.asyncDispose](): Promise<void> {
    this.close();
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
